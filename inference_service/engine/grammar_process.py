"""The process that turns grammars into masks of permitted tokens: `xgrammar` compiles here, and follows each answer.

A grammar comes from outside and its compiler is native code: what crashes it, or never ends, must not take the engine along.
"""

from __future__ import annotations

import json
import os
import re
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from inference_service.messages import Frame, Grammar

Words: TypeAlias = npt.NDArray[np.int32]
WORD = 32
"""Bits of a mask's word."""
COMPILERS = 2
"""Grammars compiled at the same time."""
MEMORY_BYTES = 8 << 30
"""Beyond it, compiling ends with an error."""
CACHE_BYTES = 1 << 30
"""Of compiled grammars, which are kept for the next request that brings the same."""
CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
MAX_WHITESPACE = 32
"""Between two parts of a JSON text: else a model may emit nothing but blanks until its limit."""


class Compile(Frame, frozen=True, tag="compile"):
    """Starts an answer."""

    key: int
    grammar: Grammar


class Advance(Frame, frozen=True, tag="advance"):
    """Tokens of an answer, each permitted by the mask that stood before it."""

    key: int
    token_ids: list[int]


class Drop(Frame, frozen=True, tag="drop"):
    """Ends an answer."""

    key: int


class Began(Frame, frozen=True, tag="began"):
    """Work on an answer has begun: the compiling of its grammar, or a mask. Whatever else is said of it ends that."""

    key: int
    compiling: bool = False


class Compiled(Frame, frozen=True, tag="compiled"):
    """A grammar's first mask is in line."""

    key: int


class Mask(Frame, frozen=True, tag="mask"):
    """What may come after the answer's first `length` tokens."""

    key: int
    length: int
    allowed: bytes
    """A bit a token id, little-endian in 32-bit words."""
    ended: bool
    """Nothing may come: the answer is whole."""


class Refusal(Frame, frozen=True, tag="refusal"):
    """There will be no mask."""

    key: int
    error: str


ToProcess = Compile | Advance | Drop
FromProcess = Began | Compiled | Mask | Refusal


def run(connection: Connection, model_dir: str, vocab_size: int) -> None:
    """Serve until the other end is closed."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, hard))
    Answers(connection, model_dir, vocab_size).serve()


@dataclass
class Answer:
    """One answer: its matcher, once its grammar is compiled, and the tokens that the matcher has, and has not, seen."""

    key: int
    grammar: Grammar
    matcher: Any = None
    length: int = 0
    pending: list[int] = field(default_factory=list)


class Answers:
    """The matcher of each answer. Compiling runs on threads of its own, so that the masks of others go on."""

    def __init__(self, connection: Connection, model_dir: str, vocab_size: int) -> None:
        self._connection = connection
        self._model_dir, self._vocab_size = model_dir, vocab_size
        self._loading, self._matching = threading.Lock(), threading.Lock()
        self._compiler: Any = None
        self._usable: Words = np.zeros(0, np.int32)
        """The tokens that stand for text, or for the end."""
        self._usable_in_json: Words = self._usable
        """Of these, those without what JSON texts never hold, but xgrammar lets into strings of limited length; nor tabs."""
        self._answers: dict[int, Answer] = {}
        # The engine must never wait until it can send, however long a mask takes; nor may a slow engine keep this process from its work.
        self._unread: SimpleQueue[ToProcess] = SimpleQueue()
        self._unsent: SimpleQueue[FromProcess] = SimpleQueue()
        threading.Thread(target=self._send_all, daemon=True).start()
        threading.Thread(target=self._work, daemon=True).start()

    def serve(self) -> None:
        """Read messages until the other end is closed."""
        decoder = msgspec.msgpack.Decoder(ToProcess)
        while True:
            try:
                self._unread.put(decoder.decode(self._connection.recv_bytes()))
            except (EOFError, OSError):
                # What is being compiled may never end.
                os._exit(0)

    def _work(self) -> None:
        pool = ThreadPoolExecutor(COMPILERS)
        while True:
            match message := self._unread.get():
                case Compile():
                    answer = self._answers[message.key] = Answer(message.key, message.grammar)
                    pool.submit(self._compile, answer)
                case Advance():
                    try:
                        self._advance(self._answers[message.key], message.token_ids)
                    except Exception as error:
                        self._unsent.put(Refusal(message.key, _readable(error)))
                case Drop():
                    # Unknown is what was at fault for the end of the process before this one.
                    self._answers.pop(message.key, None)

    def _compile(self, answer: Answer) -> None:
        try:
            compiler = self._loaded(answer.grammar.end_ids)
            if answer.key not in self._answers:
                return
            self._unsent.put(Began(answer.key, compiling=True))
            import xgrammar

            compiled = _compile(compiler, answer.grammar)
            self._unsent.put(Compiled(answer.key))
            with self._matching:
                answer.matcher = xgrammar.GrammarMatcher(compiled)
            self._advance(answer, [])
        except Exception as error:
            self._unsent.put(Refusal(answer.key, _readable(error)))

    def _advance(self, answer: Answer, token_ids: list[int]) -> None:
        with self._matching:
            answer.pending += token_ids
            if answer.matcher is None:
                return
            self._unsent.put(Began(answer.key))
            for token_id in answer.pending:
                if not answer.matcher.accept_token(token_id):
                    self._unsent.put(Refusal(answer.key, f"token {token_id} was drawn, which the grammar does not permit"))
                    return
            answer.length += len(answer.pending)
            answer.pending.clear()
            self._unsent.put(self._mask(answer))

    def _mask(self, answer: Answer) -> Mask | Refusal:
        words_1W = np.zeros((1, -(-self._vocab_size // WORD)), np.int32)
        answer.matcher.fill_next_token_bitmask(words_1W)
        words_W = words_1W[0] & (self._usable_in_json if answer.grammar.kind == "json_schema" else self._usable)
        if not words_W.any():
            return Refusal(answer.key, f"permits neither a further token after {answer.length} of them, nor the end")
        going_on_W = words_W & ~_words(answer.grammar.end_ids, len(words_W))
        allowed_W = going_on_W if answer.grammar.ignore_end else words_W
        return Mask(answer.key, answer.length, allowed_W.astype("<i4").tobytes(), ended=not going_on_W.any())

    def _loaded(self, end_ids: list[int]) -> Any:
        """The compiler for the model's tokenizer, which takes seconds to load at first."""
        with self._loading:
            if self._compiler is None:
                import xgrammar
                from transformers import PreTrainedTokenizerFast

                from inference_service.text.tokenizer import Tokenizer

                # The tokenizer that texts are encoded with: a class that the files name might build another from them.
                tokenizer = Tokenizer.load(self._model_dir)
                wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer.library)  # type: ignore[no-untyped-call]
                info = xgrammar.TokenizerInfo.from_huggingface(wrapped, vocab_size=self._vocab_size, stop_token_ids=end_ids)
                # A special token is not the text that its name is, and must not stand in for it.
                never = [token_id for token_id in tokenizer.special_ids if token_id < self._vocab_size and token_id not in end_ids]
                self._usable = ~_words(never, -(-self._vocab_size // WORD))
                control = [token_id for token_id, text in enumerate(info.decoded_vocab) if CONTROL.search(text)]
                self._usable_in_json = self._usable & ~_words(control, len(self._usable))
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)
            return self._compiler

    def _send_all(self) -> None:
        while True:
            self._connection.send_bytes(msgspec.msgpack.encode(self._unsent.get()))


def _compile(compiler: Any, grammar: Grammar) -> Any:
    match grammar.kind:
        case "json_schema":
            return compiler.compile_json_schema(grammar.text, max_whitespace_cnt=MAX_WHITESPACE)
        case "regex":
            return compiler.compile_regex(grammar.text)
        case "grammar":
            return compiler.compile_grammar(grammar.text)
        case _:
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(grammar.text))
            return compiler.compile_grammar(f"root ::= {choices}")


def _words(token_ids: list[int], count: int) -> Words:
    """The words of a mask with these bits set."""
    words_W = np.zeros(count, np.uint32)
    ids = np.array(token_ids, np.int64)
    np.bitwise_or.at(words_W, ids // WORD, np.uint32(1) << (ids % WORD).astype(np.uint32))
    return words_W.view(np.int32)


def _readable(error: Exception) -> str:
    """Without the time and the source line that xgrammar begins its messages with."""
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip() or type(error).__name__
