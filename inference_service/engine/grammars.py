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

from inference_service.engine.grammar_process import Advance, Began, Compile, Compiled, Drop, FromProcess, Mask, Refusal, ToProcess, run
from inference_service.messages import Grammar

log = logging.getLogger(__name__)

COMPILE_S = 10.0
"""A grammar that takes longer is refused."""
MASK_S = 2.0
"""One that takes longer for a mask is given up: all other answers with a grammar wait meanwhile."""


class Guide:
    """Where one answer stands in its grammar."""

    __slots__ = ("allowed", "crashed", "ended", "error", "grammar", "key", "ready", "token_ids")

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
        self.crashed = False
        """The process has ended over it: where it does so again, this is no accident."""


class Grammars:
    """All guides, and the process behind them, which starts with the first."""

    def __init__(self, model_dir: str, vocab_size: int) -> None:
        self._model_dir, self._vocab_size = model_dir, vocab_size
        self._guides: dict[int, Guide] = {}
        self._busy: dict[int, tuple[float, str]] = {}
        """What the process works on, by the guides' keys, of ended ones too: until when it may, and what is wrong with the grammar then."""
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
        if self._connection is None or not (self._guides or self._busy):
            return
        try:
            while self._connection.poll():
                if guide := self._take(self._decoder.decode(self._connection.recv_bytes())):
                    yield guide
        except (EOFError, OSError):
            at_work = [self._guides[key] for key in self._busy if key in self._guides]
            culprits = [guide.key for guide in at_work if guide.crashed]
            for guide in at_work:
                guide.crashed = True
            yield from self._restart("crashes the compiler", culprits)
            return
        now_s = time.monotonic()
        for key, (until_s, fault) in self._busy.items():
            if until_s < now_s:
                yield from self._restart(fault, [key])
                return

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
        self._process = self._connection = None

    def _take(self, message: FromProcess) -> Guide | None:
        if isinstance(message, Began):
            limit_s, what = (COMPILE_S, "to compile") if message.compiling else (MASK_S, "for a token")
            self._busy[message.key] = time.monotonic() + limit_s, f"takes more than {limit_s:g} s {what}"
        else:
            self._busy.pop(message.key, None)
        guide = self._guides.get(message.key)
        if guide is None:
            return None
        match message:
            case Began() | Compiled():
                return None
            case Mask():
                if message.length < len(guide.token_ids):
                    return None
                guide.allowed, guide.ended, guide.ready, guide.crashed = message.allowed, message.ended, True, False
            case Refusal():
                guide.error = message.error
        return guide

    def _restart(self, fault: str, culprits: list[int]) -> Iterator[Guide]:
        """Replace the process. All answers but the culprits' go on where they were."""
        log.warning("the grammar process is started anew: %s", f"a grammar {fault}" if culprits else "it has ended")
        self.close()
        self._busy.clear()
        self._spawn()
        for guide in list(self._guides.values()):
            if guide.key in culprits:
                guide.error = fault
                yield guide
            else:
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
