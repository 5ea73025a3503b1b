"""Large messages are read on threads: they are tokenized while the event loop, and with it the streams of others, goes on."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from google.protobuf.message import Message

from inference_service.rpc.caller import CALLER

P = ParamSpec("P")
T = TypeVar("T")
LARGE_BYTES = 8192
AT_ONCE = 4
"""Threads of one client's token, of asyncio's five or more: some texts take half a minute to tokenize."""


class LargeMessages:
    """Lets no client take all threads."""

    def __init__(self) -> None:
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))

    async def read(self, message: Message, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `read` gives; on a thread where the message is large."""
        if message.ByteSize() < LARGE_BYTES:
            return read(*args, **kwargs)
        caller = CALLER.get()
        if caller is None:
            return await asyncio.to_thread(read, *args, **kwargs)
        turn = self._turns[caller.name]
        await turn.acquire()
        work = asyncio.ensure_future(asyncio.to_thread(read, *args, **kwargs))
        # A call may be cancelled meanwhile; its thread is busy until it is done.
        work.add_done_callback(lambda _: turn.release())
        return await asyncio.shield(work)
