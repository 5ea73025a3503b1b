"""Turns token ids into text while they come. What all pushes and the flush give together equals the library's decode of all the ids.

A piece never ends within a UTF-8 character: a token's text is held until a later token completes it.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Protocol

import tokenizers

_utf8_decoder = getincrementaldecoder("utf-8")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    """Incremental decoding of one sequence."""

    held_tokens: int
    """How many of the newest tokens have text that is not (all) given yet."""
    holds_one_character: bool
    """Whether the held tokens end with the very next character; if not, with the next text as a whole."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        ...

    def flush(self) -> str:
        """At the end: the text that is held; U+FFFD stands for bytes that are no whole character."""
        ...


class ByteLevelDetokenizer:
    """For byte-level BPE (GPT-2 and after): a table from id to bytes, and an incremental UTF-8 decoder. About a microsecond a token."""

    __slots__ = ("_decoder", "_table", "held_tokens")

    holds_one_character = True

    def __init__(self, table: list[bytes]) -> None:
        """`table` has each id's bytes; its last entry, which is empty, stands for all ids beyond."""
        self._table = table
        self._decoder = _utf8_decoder("replace")
        self.held_tokens = 0

    def push(self, token_ids: Sequence[int]) -> str:
        table = self._table
        try:
            text = self._decoder.decode(b"".join([table[token_id] for token_id in token_ids]))
        except IndexError:
            return self.push([token_id if token_id < len(table) else -1 for token_id in token_ids])
        # A text ends at a character; bytes may be left even after some.
        pending = len(self._decoder.getstate()[0])
        self.held_tokens = self._tokens_of_last(pending, token_ids) if pending else 0
        return text

    def flush(self) -> str:
        self.held_tokens = 0
        return self._decoder.decode(b"", True)

    def _tokens_of_last(self, pending: int, token_ids: Sequence[int]) -> int:
        for count, token_id in enumerate(reversed(token_ids), 1):
            pending -= len(self._table[token_id])
            if pending <= 0:
                return count
        return self.held_tokens + len(token_ids)


class WindowDetokenizer:
    """For every other decoder (Metaspace, ByteFallback, WordPiece, ...): decodes a window of the newest tokens with the library.

    The window begins with tokens whose text was given already, so that what a decoder does at a beginning (strip a space, say) falls on
    them; the rest's text is what the window decodes to beyond theirs.
    """

    __slots__ = ("_given", "_given_text", "_skipped", "_tokenizer", "_window", "held_tokens")

    holds_one_character = False

    def __init__(self, tokenizer: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        """`skipped` are the special tokens to leave out."""
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window: list[int] = []
        self._given = 0
        self._given_text = ""
        self.held_tokens = 0

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        self.held_tokens = 0
        return self._give(self._decode())

    def _push(self, token_id: int) -> str:
        token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        if token is None:
            self.held_tokens += self.held_tokens > 0
            return ""
        self._window.append(token_id)
        self.held_tokens += 1
        # A run of byte tokens is good or bad as a whole (ByteFallback), so it can only be read when another token has ended it.
        if _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._decode()
        if text.endswith("\ufffd"):
            return ""
        self.held_tokens = 0
        return self._give(text)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)

    def _give(self, window_text: str) -> str:
        text = window_text[len(self._given_text) :]
        self._window = self._window[self._given :]
        self._given = len(self._window)
        self._given_text = self._decode()
        return text


def byte_table(tokenizer: tokenizers.Tokenizer) -> list[bytes] | None:
    """Each id's bytes, and an empty last entry, where the tokenizer's decoder is byte-level; else None. Ids without a token have none."""
    if not isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 2)
    byte_of = byte_alphabet()
    for token, token_id in vocabulary.items():
        try:
            table[token_id] = bytes([byte_of[character] for character in token])
        except KeyError:  # not in the byte alphabet, so an added token as it stands
            table[token_id] = token.encode("utf-8", "replace")
    return table


def byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 stands for itself, the other bytes for characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
