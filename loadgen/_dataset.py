"""Prompts of a file: ShareGPT's conversations, or JSON lines of our own simple format.

A JSON line has one of `prompt` (text), `token_ids` and `messages` ([{"role": ..., "content": ...}, ...]), and may have `output_tokens`:

    {"prompt": "Why is the sky blue?", "output_tokens": 64}

ShareGPT's file is a JSON array of {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}. Each answer's
length there, counted by the tokenizer, is asked for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from inference_service.config import Config
from inference_service.loadtest import Workload
from inference_service.sections import Count
from loadgen._forms import Content, check_conversation, choose_form, following, opening, settings
from loadgen._lengths import draw, largest
from loadgen._target import Message, Model, Observation, Request, Takes, TargetError
from loadgen._vocabulary import load_tokenizer

_HUMAN, _MODEL = {"human", "user"}, {"gpt", "chatgpt", "assistant", "bing", "bard"}
"""Who speaks in ShareGPT's files and those made like them; "system" and others are left out."""


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str = ""
    token_ids: list[int] = []
    messages: list[Message] = []
    output_tokens: Count | None = None


class _Remark(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Remark]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, and how long the answer was."""

    content: Content | tuple[Message, ...]
    output_tokens: int | None
    """None: the file does not say."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A conversation of the file."""

    where: str
    turns: list[Turn]


class FilePrompts:
    """The file's entries, each once in an order drawn from the seed, and then again in another."""

    def __init__(self, config: Config, workload: Workload, model: Model, takes: Takes) -> None:
        """Raises TargetError, which names the file and the line or entry, for what cannot be read or sent."""
        self._seed = config.loadtest.seed
        self._workload = workload
        self._form = choose_form(workload, takes)
        if config.loadtest.arrival == "trace":
            raise TargetError("loadtest.workload.file: a trace's prompts have lengths of their own; leave one of the two out")
        if (turns := largest(workload.turns)) > 1:
            check_conversation(self._form, takes)
        path = Path(workload.file)
        reader = _Reader(config, workload, self._form)
        entries = reader.read_sharegpt(path) if path.suffix == ".json" else reader.read_lines(path)
        self._entries = [Entry(entry.where, entry.turns[:turns]) for entry in entries if reader.fits(entry.turns[:turns])]
        if not self._entries:
            raise TargetError(f"loadtest.workload.file: {path} has no entry that can be sent")
        if model.max_context:
            self._check_context(reader, model)
        self._order: tuple[int, list[int]] = (-1, [])

    def request(self, index: int, input_tokens: int | None, output_tokens: int | None, prefix_ids: Sequence[int]) -> Request:
        workload, noise, turn = self._workload, random.Random(f"{self._seed}/{index}"), self._entry(index).turns[0]
        seed = noise.getrandbits(31)
        content = turn.content
        prompt = {"messages": content} if isinstance(content, tuple) else opening(self._form, content)
        return Request(
            output_tokens=output_tokens or turn.output_tokens or draw(workload.output_tokens, noise),
            **settings(workload, seed, index),
            **prompt,
        )

    def next_turn(self, request: Request, observation: Observation) -> Request | None:
        turns, number = self._entry(request.index).turns, request.turn + 1
        if number >= min(len(turns), draw(self._workload.turns, random.Random(f"{self._seed}/turns/{request.index}"))):
            return None
        content = turns[number].content
        assert not isinstance(content, tuple)
        noise = random.Random(f"{self._seed}/{request.index}/{number}")
        output_tokens = turns[number].output_tokens or draw(self._workload.output_tokens, noise)
        return following(request, observation, content, output_tokens=output_tokens)

    def _entry(self, index: int) -> Entry:
        epoch, place = divmod(index, len(self._entries))
        if self._order[0] != epoch:
            order = list(range(len(self._entries)))
            random.Random(f"{self._seed}/order/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._entries[self._order[1][place]]

    def _check_context(self, reader: _Reader, model: Model) -> None:
        for entry in self._entries:
            if (needed := reader.tokens(entry.turns)) > model.max_context:
                raise TargetError(
                    f"{entry.where}: {needed} tokens with its answers, but {model.name} has a context of {model.max_context}; "
                    "leave such out with loadtest.workload.file_max_tokens"
                )


class _Reader:
    """Reads a file into entries of one form."""

    def __init__(self, config: Config, workload: Workload, form: str) -> None:
        self._config, self._workload, self._form = config, workload, form
        self._loaded: Tokenizer | None = None

    def read_lines(self, path: Path) -> list[Entry]:
        entries = []
        for number, line in enumerate(_read(path).splitlines(), start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                fields = msgspec.json.decode(line, type=_Line)
            except msgspec.MsgspecError as error:
                raise TargetError(f"{where}: {error}") from None
            entries.append(Entry(where, [Turn(self._content(fields, where), fields.output_tokens)]))
        return entries

    def read_sharegpt(self, path: Path) -> list[Entry]:
        try:
            conversations = msgspec.json.decode(_read(path), type=list[_Conversation])
        except msgspec.MsgspecError as error:
            raise TargetError(f"{path}: not a file of ShareGPT's: {error}") from None
        entries = []
        for number, conversation in enumerate(conversations):
            remarks = [remark for remark in conversation.conversations if remark.value and remark.speaker in _HUMAN | _MODEL]
            turns = [
                Turn(self._text(said.value), max(self._count(answer.value), 1))
                for said, answer in pairwise(remarks)
                if said.speaker in _HUMAN and answer.speaker in _MODEL
            ]
            # As in other tools' use of it, a conversation that the model began is left out.
            if turns and remarks[0].speaker in _HUMAN:
                entries.append(Entry(f"{path}[{number}]", turns))
        return entries

    def tokens(self, turns: list[Turn]) -> int:
        """Of the prompts and answers of a conversation, as far as they are known; a chat's template comes on top."""
        return sum(self._size(turn.content) + (turn.output_tokens or largest(self._workload.output_tokens)) for turn in turns)

    def fits(self, turns: list[Turn]) -> bool:
        return not self._workload.file_max_tokens or self.tokens(turns) <= self._workload.file_max_tokens

    def _content(self, line: _Line, where: str) -> Content | tuple[Message, ...]:
        given = [name for name in ("prompt", "token_ids", "messages") if getattr(line, name)]
        if len(given) != 1:
            raise TargetError(f"{where}: one of prompt, token_ids and messages is needed, but there is {' and '.join(given) or 'none'}")
        if line.messages:
            if self._form != "messages":
                raise TargetError(f"{where}: messages are for a chat; the target, or loadtest.workload.prompt, is not for one")
            return tuple(line.messages)
        if line.prompt:
            return self._text(line.prompt)
        return line.token_ids if self._form == "token_ids" else str(self._tokenizer.decode(line.token_ids))

    def _text(self, text: str) -> Content:
        return list(self._tokenizer.encode(text).ids) if self._form == "token_ids" else text

    def _size(self, content: Content | tuple[Message, ...]) -> int:
        if isinstance(content, tuple):
            return sum(self._count(message.content) for message in content)
        return self._count(content) if isinstance(content, str) else len(content)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @property
    def _tokenizer(self) -> Any:
        if self._loaded is None:
            self._loaded = load_tokenizer(self._config, self._workload)
        return self._loaded


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(f"loadtest.workload.file: {path}: {getattr(error, 'strerror', None) or error}") from None
