"""A connection to the engine's socket, on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import zmq

from inference_service.messages import Hello, ToEngine, ToFrontEnd


class EngineSocket:
    """Sends messages to the engine at an address, and gives those that it sends to `on_message`. It may be there before the engine is."""

    def __init__(self, address: str, hello: Hello, on_message: Callable[[ToFrontEnd], None], name: bytes = b"") -> None:
        """`name` is the identity that the engine knows this end by, unique among all that ever connect to it; b"": any."""
        self._on_message = on_message
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToFrontEnd)
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        if name:
            self._socket.set(zmq.IDENTITY, name)
        self._socket.connect(address)
        self._loop.add_reader(self._socket.FD, self.receive)
        self.send(hello)

    def send(self, message: ToEngine) -> None:
        """Queue a message; it waits for an engine that is not there yet."""
        self._socket.send(self._encoder.encode(message))
        # The descriptor is edge-triggered, and sending may have consumed the edge of something that has arrived.
        if int(self._socket.EVENTS) & zmq.POLLIN:
            self._loop.call_soon(self.receive)

    def receive(self) -> None:
        """Hand out what has arrived."""
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(self._decoder.decode(frame))

    def close(self) -> None:
        """Nothing more is handed out, and what is queued is dropped."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._socket.close()
