"""What supervisor and front ends say to each other: JSON lines over a socket pair. Of one front end, it is said inside the process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from inference_service.config import Config

LINE_BYTES = 1 << 20
Received = TypeVar("Received")
Sent = TypeVar("Sent")


class Message(msgspec.Struct, frozen=True, tag=True):
    """The base of all that is said."""


# --- to a front end ---


class WorkerStart(Message, frozen=True):
    """The first message: what a worker is."""

    config: Config
    """With the ports that the supervisor has reserved."""
    model_dir: str
    index: int
    name: str
    """What the engine knows it by."""
    joins: bool
    """Others serve already: it is to listen once it can serve, too."""


class EngineAt(Message, frozen=True):
    """An engine has been started."""

    address: str
    pid: int


class EngineLost(Message, frozen=True):
    """The engine is lost, and with it all that was in flight."""

    reason: str
    retry_s: float
    """When there may be another one; 0: never."""


EngineEvent = EngineAt | EngineLost


class EngineProgress(Message, frozen=True):
    """How the engine's start gets on."""

    what: str


class Drain(Message, frozen=True):
    """Begin to drain; from a front end: it has been asked to, and all are to follow."""


class Stop(Message, frozen=True):
    """Stop at once."""


ToWorker = WorkerStart | EngineAt | EngineLost | EngineProgress | Drain | Stop


# --- from a front end ---


class Listening(Message, frozen=True):
    """Its ports are bound."""


class Serving(Message, frozen=True):
    """It has met a ready engine."""


class Alive(Message, frozen=True):
    """It does not hang; said all the time."""


class NotStarted(Message, frozen=True):
    """It ends, since it cannot start."""

    error: str


FromWorker = Listening | Serving | Alive | Drain | NotStarted


class Control(Generic[Received, Sent]):
    """One end of a socket pair; iterating gives what the other end sends, until it is closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.json.Decoder[Received]) -> None:
        self._reader, self._writer = reader, writer
        self._encoder, self._decoder = msgspec.json.Encoder(), decoder

    @classmethod
    async def open(cls, end: socket.socket, decoder: msgspec.json.Decoder[Received]) -> Control[Received, Sent]:
        """Take over an end."""
        reader, writer = await asyncio.open_unix_connection(sock=end, limit=LINE_BYTES)
        return cls(reader, writer, decoder)

    def send(self, message: Sent) -> None:
        """Queue a message; one for an end that is gone is dropped."""
        if not self._writer.is_closing():
            self._writer.write(self._encoder.encode(message) + b"\n")

    async def __aiter__(self) -> AsyncIterator[Received]:
        with suppress(ConnectionError):
            while line := await self._reader.readline():
                yield self._decoder.decode(line)

    async def close(self) -> None:
        """Send what is queued, if there is still somebody to take it."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
