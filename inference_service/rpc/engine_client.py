"""The front end's side of the engine: its socket, and a stream for each request in flight."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from itertools import count

from msgspec.structs import replace

from inference_service.messages import (
    Abort,
    AbortById,
    Aborted,
    ExpertSample,
    Finish,
    Hello,
    Load,
    Output,
    Profile,
    Ready,
    Step,
    Submit,
    ToEngine,
    ToFrontEnd,
)
from inference_service.rpc.control import EngineAt, EngineEvent, EngineLost
from inference_service.rpc.engine_socket import EngineSocket
from inference_service.rpc.errors import RpcError, unavailable

NO_LOAD = Load(0, 0, 0, 0, output_tokens=1 << 62)
"""Of an engine that has said nothing yet. What it had made before it was first heard of does not count."""
EXPERT_SAMPLES = 64
"""Counts of experts that are kept: those of the last seconds."""


class Stream:
    """The outputs of one call's choices, from the socket to the call that writes them.

    What arrives while the writer is busy is handed over in one piece, so a slow reader gets fewer, larger deltas. What waits is bounded by
    the choices' own max_tokens.
    """

    __slots__ = ("_error", "_loop", "_pending", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: list[tuple[int, Output]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: RpcError | None = None

    def put(self, time_ns: int, output: Output) -> None:
        self._pending.append((time_ns, output))
        self._wake()

    def fail(self, error: RpcError) -> None:
        """End the stream; what had arrived before is still handed over."""
        self._error = self._error or error
        self._wake()

    async def take(self) -> list[tuple[int, Output]]:
        """All outputs that have arrived, with the engine's clock; waits for the first. Raises what `fail` was given."""
        if not self._pending:
            if self._error is None:
                self._waiter = self._loop.create_future()
                await self._waiter
            if not self._pending:
                assert self._error is not None
                raise self._error
        taken, self._pending = self._pending, []
        return taken

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class EngineClient:
    """Sends requests to the engine, wherever it is now, and hands its outputs out. All of it runs on one event loop.

    `on_change` is called when an engine got ready or was lost.
    """

    def __init__(self, name: str, on_change: Callable[[], None]) -> None:
        """`name` is what the engine knows this front end by, never used before."""
        self.ready: Ready | None = None
        """What the engine says of itself; None: there is none that can serve."""
        self.loss: EngineLost | None = None
        """How the last engine was lost, until another one is ready."""
        self.losses = 0
        """Engines lost so far."""
        self.load = NO_LOAD
        self.experts: deque[ExpertSample] = deque(maxlen=EXPERT_SAMPLES)
        """The newest counts of experts."""
        self.compiles = self.fused_steps = 0
        """Kernels that the engine has compiled or loaded since it was ready."""
        self.pid = 0
        """The engine's process; 0: there is none."""
        self.output_tokens = 0
        """Ids that engines have made since this front end began, for all front ends."""
        self.on_step: list[Callable[[Step], None]] = []
        """Called with each Step, before its outputs are handed on."""
        self._name = name.encode()
        self._on_change = on_change
        self._streams: dict[int, Stream] = {}
        self._aborts: dict[int, asyncio.Future[bool]] = {}
        # Never begun anew, so that nothing an old engine has said can be taken for a new request's.
        self._keys = count(1)
        self._socket: EngineSocket | None = None

    def follow(self, event: EngineEvent) -> None:
        """Connect to a new engine, or leave one that is lost: every stream ends UNAVAILABLE."""
        self.close()
        self.ready, self.load, self.pid = None, NO_LOAD, 0
        if isinstance(event, EngineAt):
            self.pid = event.pid
            self._socket = EngineSocket(event.address, Hello(), self._dispatch, self._name)
            return
        self.loss = event
        self.losses += 1
        self.fail_all(self.lost_error())
        for call in self._aborts:
            self._answer(call, found=False)
        self._on_change()

    def lost_error(self) -> RpcError:
        """What ends calls while the engine is lost."""
        assert self.loss is not None
        what = "is lost and being started again" if self.loss.retry_s else "is lost"
        return unavailable("ENGINE_LOST", f"the engine {what}: {self.loss.reason}", retry_s=self.loss.retry_s)

    def next_key(self) -> int:
        """A key for a new request."""
        return next(self._keys)

    def submit(self, request_id: str, submits: list[Submit]) -> Stream:
        """Hand a call's choices to the engine. The caller must `release` each key in the end."""
        stream = Stream()
        for submit in submits:
            self._streams[submit.key] = stream
            self._send(replace(submit, request_id=request_id))
        if self.ready is None:
            stream.fail(self.lost_error())
        return stream

    def abort(self, keys: list[int]) -> None:
        """End choices early: the stream gets a last output of each with the reason "abort"."""
        self._send(Abort(keys))
        for key in keys:
            if stream := self._streams.get(key):
                stream.put(time.monotonic_ns(), Output(key, [], finish=Finish("abort")))

    async def abort_by_id(self, request_id: str) -> bool:
        """End a request of whichever front end, as `abort` does; False: it is not in flight."""
        if self.ready is None:
            return False
        call = self.next_key()
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._aborts[call] = answer
        self._send(AbortById(request_id, call))
        try:
            return await answer
        finally:
            self._aborts.pop(call, None)

    def profile(self, path: str, seconds: float) -> None:
        """Have the engine record a profile; see execution/profiling.py."""
        self._send(Profile(path, seconds))

    def release(self, keys: list[int], ended: bool) -> None:
        """Forget choices; those that have not `ended` by themselves are aborted."""
        known = [key for key in keys if self._streams.pop(key, None) is not None]
        if known and not ended:
            self._send(Abort(known))

    def fail_all(self, error: RpcError) -> None:
        """End every stream with an error."""
        for stream in self._streams.values():
            stream.fail(error)

    def close(self) -> None:
        """Leave the engine; nothing that it has sent is taken in any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: ToEngine) -> None:
        # Where there is no engine, there is nothing to start or to end.
        if self._socket is not None and self.ready is not None:
            self._socket.send(message)

    def _dispatch(self, message: ToFrontEnd) -> None:
        if isinstance(message, Step):
            self.output_tokens += max(0, message.load.output_tokens - self.load.output_tokens)
            self.load, self.compiles, self.fused_steps = message.load, message.compiles, message.fused_steps
            if message.experts:
                self.experts.append(message.experts)
            for follow in self.on_step:
                follow(message)
            for output in message.outputs:
                stream = self._streams.get(output.key)
                if stream is not None:
                    stream.put(message.time_ns, output)
        elif isinstance(message, Aborted):
            self._answer(message.call, message.found)
        elif isinstance(message, Ready):
            self.ready, self.loss = message, None
            self._on_change()

    def _answer(self, call: int, found: bool) -> None:
        answer = self._aborts.get(call)
        if answer is not None and not answer.done():
            answer.set_result(found)
