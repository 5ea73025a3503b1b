"""The front end's side of the engine: its process, its socket, and a stream for each request in flight."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from itertools import count

import msgspec
import zmq

from inference_service.messages import (
    Abort,
    EngineStart,
    ExpertSample,
    Failed,
    Finish,
    Hello,
    Load,
    Output,
    Progress,
    Ready,
    Step,
    Submit,
    ToEngine,
    ToFrontEnd,
)
from inference_service.rpc.errors import RpcError, unavailable

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
    """Starts the engine, sends requests to it and hands its outputs out. All of it runs on one event loop.

    `ready` is set once the engine can serve, `error` once it is lost; `on_change` is called after either.
    """

    def __init__(self, start: EngineStart, on_change: Callable[[], None], on_progress: Callable[[str], None]) -> None:
        self.ready: Ready | None = None
        self.error: str | None = None
        self.load = Load(0, 0, 0, 0)
        self.experts: deque[ExpertSample] = deque(maxlen=EXPERT_SAMPLES)
        """The newest counts of experts."""
        self.compiles = self.fused_steps = 0
        """Kernels that the engine has compiled or loaded since it was ready."""
        self._heard_ns = time.monotonic_ns()
        self.output_tokens = 0
        """Ids received since the start."""
        self._on_change = on_change
        self._on_progress = on_progress
        self._start = start
        self._directory = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._streams: dict[int, Stream] = {}
        self._keys = count(1)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToFrontEnd)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)

    @property
    def pid(self) -> int:
        """The engine's process id."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the engine's process; `on_change` tells when it is ready."""
        # The directory is private to the user, and so is the socket in it.
        self._directory = tempfile.mkdtemp(prefix="inference-service-")
        address = f"ipc://{self._directory}/engine"
        start = msgspec.structs.replace(self._start, address=address, parent_pid=os.getpid())
        self._socket.connect(address)
        asyncio.get_running_loop().add_reader(self._socket.FD, self._receive)
        self._send(Hello())
        # Popen, not asyncio's: it starts without fork handlers, which gRPC's threads would not survive.
        # In a session of its own, so that Ctrl-C in a terminal reaches the front end alone, which drains.
        command = [sys.executable, "-m", "inference_service.engine.process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(start))
        self._process.stdin.close()
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    def next_key(self) -> int:
        """A key for a new request."""
        return next(self._keys)

    def submit(self, submits: list[Submit]) -> Stream:
        """Hand a call's choices to the engine. The caller must `release` each key in the end."""
        stream = Stream()
        for submit in submits:
            self._streams[submit.key] = stream
            if self.error is None:
                self._send(submit)
        if self.error is not None:
            stream.fail(self._lost())
        return stream

    def abort(self, keys: list[int]) -> None:
        """End choices early: the stream gets a last output of each with the reason "abort"."""
        self._send(Abort(keys))
        for key in keys:
            if stream := self._streams.get(key):
                stream.put(time.monotonic_ns(), Output(key, [], finish=Finish("abort")))

    def release(self, keys: list[int], ended: bool) -> None:
        """Forget choices; those that have not `ended` by themselves are aborted."""
        known = [key for key in keys if self._streams.pop(key, None) is not None]
        if known and not ended and self.error is None:
            self._send(Abort(known))

    async def stop(self) -> None:
        """End the engine's process. It holds nothing that must be saved."""
        loop = asyncio.get_running_loop()
        if self._pidfd >= 0:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        loop.remove_reader(self._socket.FD)
        self._socket.close()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _send(self, message: ToEngine) -> None:
        self._socket.send(self._encoder.encode(message))
        # The descriptor is edge-triggered, and sending may have consumed the edge of something that has arrived.
        if int(self._socket.EVENTS) & zmq.POLLIN:
            asyncio.get_running_loop().call_soon(self._receive)

    def silence_s(self) -> float:
        """How long nothing has been heard of the engine, what waits in the socket included."""
        self._receive()
        return (time.monotonic_ns() - self._heard_ns) / 1e9

    def _receive(self) -> None:
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._dispatch(self._decoder.decode(frame))

    def _dispatch(self, message: ToFrontEnd) -> None:
        self._heard_ns = time.monotonic_ns()
        if isinstance(message, Step):
            self.load, self.compiles, self.fused_steps = message.load, message.compiles, message.fused_steps
            if message.experts:
                self.experts.append(message.experts)
            for output in message.outputs:
                self.output_tokens += len(output.token_ids)
                stream = self._streams.get(output.key)
                if stream is not None:
                    stream.put(message.time_ns, output)
        elif isinstance(message, Progress):
            self._on_progress(message.what)
        elif isinstance(message, Ready):
            self.ready = message
            self._on_change()
        elif isinstance(message, Failed):
            self.lose(message.error)

    def _exited(self) -> None:
        """The process has ended: what it said last comes first, such as why."""
        assert self._process is not None
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._receive()
        self.lose(f"the engine's process ended with status {self._process.wait()}")

    def lose(self, error: str) -> None:
        """Declare the engine lost: every stream ends UNAVAILABLE."""
        if self.error is not None:
            return
        self.error = error
        self.load = Load(0, 0, 0, 0)
        self.fail_all(self._lost())
        self._on_change()

    def fail_all(self, error: RpcError) -> None:
        """End every stream with an error."""
        for stream in self._streams.values():
            stream.fail(error)

    def _lost(self) -> RpcError:
        return unavailable("ENGINE_LOST", f"the engine is lost: {self.error}")
