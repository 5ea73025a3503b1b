"""A child process as an event loop sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from typing import IO

REAP_S = 0.02


class Child:
    """Starts a command, whose end sets `exited`. Not asyncio's own, which knows no pidfd under uvloop and would reap in a thread."""

    def __init__(self, command: list[str], stdin: int | IO[bytes]) -> None:
        self.exited = asyncio.Event()
        # Ctrl-C in a terminal, and a SIGTERM that a service manager sends to all at once, are for the parent alone, which drains and then
        # ends this one. What is blocked here stays so in the child, from before its first instruction on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        try:
            # Popen starts it without fork handlers, which gRPC's threads would not survive.
            self._process = subprocess.Popen(command, stdin=stdin, start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
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
        """Wait until it has ended, and all that it held is free; after `patience_s` it is killed. What it had started ends with it."""
        try:
            await asyncio.wait_for(self.exited.wait(), patience_s)
        except TimeoutError:
            self.kill()
            await self.exited.wait()
        while self._has_orphans():
            await asyncio.sleep(REAP_S)

    def _has_orphans(self) -> bool:
        """Whether some of what it had started are still children of this process, which inherits them as the first of a container."""
        with suppress(ChildProcessError):
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass
            return True
        return False

    def _exited(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        # What it had started is in its session. There is none where `kill` has just found it dead, and waited for it.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.exited.set()
