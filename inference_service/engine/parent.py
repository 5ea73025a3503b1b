"""Ends the engine's process when the one that started it is gone, whatever the engine is doing: loading, stepping or hanging."""

from __future__ import annotations

import os
import select
import shutil
import threading
from pathlib import Path


def end_with_parent(pid: int, socket: Path) -> None:
    """Watch over the parent, on a thread. The directory of the engine's socket goes with it, since nobody else will remove that."""

    def wait() -> None:
        select.select([pidfd], [], [])
        end()

    def end() -> None:
        shutil.rmtree(socket.parent, ignore_errors=True)
        os._exit(1)

    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        end()
    threading.Thread(target=wait, name="parent", daemon=True).start()
