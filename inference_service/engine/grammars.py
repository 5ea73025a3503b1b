"""The engine's end of structured output: a guide for each answer that a grammar restricts.

The masks are made in a process of their own (grammar_process.py), off the step loop: a guide is not ready while the mask for its answer's
next token is being made, and the scheduler leaves the request out of steps until it is. Requests without a grammar never wait.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import msgspec

from inference_service.engine.grammar_process import Advance, Began, Compile, Drop, FromProcess, Mask, Refusal, ToProcess, run
from inference_service.messages import Grammar

log = logging.getLogger(__name__)

COMPILE_S = 10.0
"""A grammar that takes longer is refused."""


class Guide:
    """Where one answer stands in its grammar."""

    __slots__ = ("allowed", "began_s", "ended", "error", "grammar", "key", "ready", "token_ids")

    def __init__(self, key: int, grammar: Grammar) -> None:
        self.key, self.grammar = key, grammar
        self.token_ids: list[int] = []
        """The answer so far."""
        self.ready = False
        """Whether `allowed` and `ended` speak of what comes after it."""
        self.allowed = b""
        """A bit a token id, as Row.allowed has it."""
        self.ended = False
        """The answer is whole: nothing may follow."""
        self.error = ""
        """Why there is no mask, nor will be."""
        self.began_s = 0.0
        """When its compiling began, while that goes on."""


class Grammars:
    """All guides, and the process behind them, which starts with the first."""

    def __init__(self, model_dir: str, vocab_size: int) -> None:
        self._model_dir, self._vocab_size = model_dir, vocab_size
        self._guides: dict[int, Guide] = {}
        self._next_key = 0
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._decoder = msgspec.msgpack.Decoder(FromProcess)

    @property
    def fileno(self) -> int | None:
        """Readable when a mask has arrived; None: no guide waits for one."""
        return self._connection.fileno() if self._connection and self._guides else None

    def start(self, grammar: Grammar) -> Guide:
        """Begin an answer."""
        guide = self._guides[self._next_key] = Guide(self._next_key, grammar)
        self._next_key += 1
        if self._process is None:
            self._spawn()
        self._send(Compile(guide.key, grammar))
        return guide

    def advance(self, guide: Guide, token_id: int) -> None:
        """Add a token to an answer: its mask is out of date now."""
        guide.token_ids.append(token_id)
        guide.ready = False
        self._send(Advance(guide.key, [token_id]))

    def end(self, guide: Guide) -> None:
        """Forget an answer."""
        if self._guides.pop(guide.key, None):
            self._send(Drop(guide.key))

    def poll(self) -> Iterator[Guide]:
        """Take in what the process has sent: the guides that have become ready, or failed."""
        if not self._guides or self._connection is None:
            return
        try:
            while self._connection.poll():
                if guide := self._take(self._decoder.decode(self._connection.recv_bytes())):
                    yield guide
        except (EOFError, OSError):
            yield from self._restart("crashes the compiler")
            return
        limit_s = time.monotonic() - COMPILE_S
        if any(0 < guide.began_s < limit_s for guide in self._guides.values()):
            yield from self._restart(f"takes more than {COMPILE_S:g} s to compile", limit_s)

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
        self._process = self._connection = None

    def _take(self, message: FromProcess) -> Guide | None:
        guide = self._guides.get(message.key)
        if guide is None:
            return None
        match message:
            case Began():
                guide.began_s = time.monotonic()
                return None
            case Mask():
                guide.began_s = 0.0
                if message.length < len(guide.token_ids):
                    return None
                guide.allowed, guide.ended, guide.ready = message.allowed, message.ended, True
            case Refusal():
                guide.began_s, guide.error = 0.0, message.error
        return guide

    def _restart(self, fault: str, began_before_s: float = float("inf")) -> Iterator[Guide]:
        """Replace the process. What it was compiling is at fault; all other answers go on where they were."""
        log.warning("the grammar process is started anew: a grammar %s", fault)
        self.close()
        self._spawn()
        for guide in list(self._guides.values()):
            if 0 < guide.began_s < began_before_s:
                guide.began_s, guide.error = 0.0, fault
                yield guide
            else:
                guide.began_s = 0.0
                self._send(Compile(guide.key, guide.grammar))
                if guide.token_ids:
                    self._send(Advance(guide.key, guide.token_ids))

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=run, args=(theirs, self._model_dir, self._vocab_size), name="grammars", daemon=True)
        self._process.start()
        theirs.close()

    def _send(self, message: ToProcess) -> None:
        assert self._connection is not None
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(message))
        except OSError:
            log.debug("the grammar process is gone: the next poll sees it")
