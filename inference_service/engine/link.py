"""The engine's end of the socket to its front ends, and to the process that watches over it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import zmq

from inference_service.messages import Gone, Hello, Ready, ToEngine, ToFrontEnd


class FrontEnds:
    """A ROUTER socket: receives from any front end, sends to each by its identity."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        # A front end that lags must not block the engine, nor lose tokens: its frames queue here without limit, until it is gone.
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.bind(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._ready: Ready | None = None
        self._gone: set[bytes] = set()
        self._watcher = b""
        self.known: list[bytes] = []

    def receive(self, timeout_s: float, wake: int | None = None) -> Iterator[tuple[bytes, ToEngine]]:
        """Everything that has arrived; waits up to `timeout_s` for the first message, or until the file descriptor `wake` is readable."""
        if timeout_s:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            if wake is not None:
                poller.register(wake, zmq.POLLIN)
            if not poller.poll(int(timeout_s * 1000)):
                return
        while True:
            try:
                origin, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # What a front end had sent before it died may come later than the word that it has.
            if origin in self._gone:
                continue
            message = self._decoder.decode(frame)
            if isinstance(message, Hello):
                self._welcome(origin, message)
                continue
            if isinstance(message, Gone):
                self._gone.add(message.name)
                self.known = [name for name in self.known if name != message.name]
            yield origin, message

    def await_watcher(self, timeout_s: float) -> None:
        """So that it hears how the start gets on; nobody sends requests before that."""
        end_s = time.monotonic() + timeout_s
        while not self._watcher and (left_s := end_s - time.monotonic()) > 0:
            list(self.receive(left_s))

    def send(self, origin: bytes, message: ToFrontEnd) -> None:
        """Queue a message for one front end."""
        self._socket.send_multipart((origin, self._encoder.encode(message)))

    def ready(self, message: Ready) -> None:
        """Tell all that the engine can serve, also those that come later."""
        self._ready = message
        for origin in self.known:
            self.send(origin, message)
        self.report(message)

    def report(self, message: ToFrontEnd) -> None:
        """Queue a message for the watcher, if there is one yet."""
        if self._watcher:
            self.send(self._watcher, message)

    def close(self) -> None:
        """Send what is queued, within a second."""
        self._socket.close()

    def _welcome(self, origin: bytes, hello: Hello) -> None:
        if hello.watches:
            self._watcher = origin
        elif origin not in self.known:
            self.known.append(origin)
        if self._ready:
            self.send(origin, self._ready)
