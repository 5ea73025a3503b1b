"""A child process as an event loop sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from typing import IO


class Child:
    """Starts a command, whose end sets `exited`. Not asyncio's own, which knows no pidfd under uvloop and would reap in a thread."""

    def __init__(self, command: list[str], stdin: int | IO[bytes]) -> None:
        self.exited = asyncio.Event()
        # Popen starts it without fork handlers, which gRPC's threads would not survive. In a session of its own, so that Ctrl-C in a
        # terminal reaches the parent alone, which drains.
        self._process = subprocess.Popen(command, stdin=stdin, start_new_session=True)
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    @property
    def end(self) -> str:
        """How it ended."""
        status = self._process.wait()
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe's end, where `stdin` was PIPE."""
        assert self._process.stdin is not None
        return self._process.stdin

    def kill(self) -> None:
        """End it at once; one that has ended is left alone."""
        self._process.kill()

    async def ended(self, patience_s: float = 0.0) -> None:
        """Wait until it has ended, and all that it held is free; after `patience_s` it is killed."""
        try:
            await asyncio.wait_for(self.exited.wait(), patience_s)
        except TimeoutError:
            self.kill()
            await self.exited.wait()

    def _exited(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self.exited.set()
