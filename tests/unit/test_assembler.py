"""Ids and text of one choice: held together, cut at stop strings, whatever the chunking."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from inference_service.messages import TokenLogprobs
from inference_service.text.assembler import Assembler, Piece
from inference_service.text.tokenizer import Tokenizer


def byte_level() -> Tokenizer:
    """A small byte-level vocabulary in which characters are often split over tokens, and a special token."""
    words = ["a", "b", "c", "ab", "ca", "Ġ", "Ġa", "ð", "Ł", "ĺ", "Ģ", "ðŁ", "Ģa", "aðŁ", "ĺĢ", "é"]
    assert set("".join(words)) <= set(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>"])
    return Tokenizer(library, {}, {})


def sentencepiece() -> Tokenizer:
    words = ["<unk>", "a", "b", "c", "ab", "▁a", "▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    library = tokenizers.Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[], byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(["<s>"])
    return Tokenizer(library, {}, {})


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()
stops = st.lists(st.text("abc 😀\ufffd", min_size=1, max_size=3), max_size=3)
byte_level_ids = st.lists(st.integers(0, BYTE_LEVEL.vocab_size), max_size=14)
sentencepiece_ids = st.lists(st.integers(0, SENTENCEPIECE.vocab_size), max_size=14)


def offline(text: str, stop: list[str], checked_from: int) -> tuple[str, str | None]:
    for end in range(checked_from + 1, len(text) + 1):
        for string in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(string):
                return text[: end - len(string)], string
    return text, None


def chunkings(count: int, cuts: list[int]) -> list[tuple[int, int]]:
    bounds = [0, *sorted(cut % (count + 1) for cut in cuts), count]
    return list(pairwise(bounds))


def run(assembler: Assembler, ids: list[int], chunks: list[tuple[int, int]]) -> list[tuple[int, Piece | None]]:
    """Each push's piece, and the finish's, with how many tokens had been pushed; a token's time is its place."""
    steps: list[tuple[int, Piece | None]] = []
    for start, stop in chunks:
        logprobs = [TokenLogprobs(-float(place), [], []) for place in range(start, stop)]
        steps.append((stop, assembler.push(ids[start:stop], list(range(start, stop)), logprobs)))
    return [*steps, (len(ids), assembler.finish())]


@settings(max_examples=800, deadline=None)
@given(ids=byte_level_ids, stop=stops, cuts=st.lists(st.integers(0, 14), max_size=14), skip=st.booleans(), min_tokens=st.integers(0, 6))
def test_pieces_equal_the_offline_rule(ids: list[int], stop: list[str], cuts: list[int], skip: bool, min_tokens: int) -> None:
    text = BYTE_LEVEL.decode(ids, skip)
    # Text belongs to the token that completes it, and an unfinished end to the last token.
    checked_from = len(BYTE_LEVEL.detokenizer(skip).push(ids[:min_tokens])) if min_tokens < len(ids) else len(text)
    text, matched = offline(text, stop, checked_from)
    # Where each token's text ends: a character begun and not finished decodes to one U+FFFD, which stands in its place.
    ends = [len(BYTE_LEVEL.decode(ids[: place + 1], skip)) for place in range(len(ids))]

    sent, places, stopped = "", list[int](), None
    for pushed, piece in run(Assembler(BYTE_LEVEL.detokenizer(skip), stop, min_tokens), ids, chunkings(len(ids), cuts)):
        if piece is not None:
            assert stopped is None, "nothing follows a match"
            assert piece.token_ids or piece.text or piece.stop
            assert [ids[place] for place in piece.times_ns] == piece.token_ids
            assert [-logprobs.chosen for logprobs in piece.logprobs or []] == piece.times_ns
            sent += piece.text
            places += piece.times_ns
            stopped = piece.stop
        # Each id exactly with the text that ends its token, neither earlier nor later.
        assert places == [place for place in range(pushed) if ends[place] <= len(sent)][: len(places) if stopped else None]
    assert (sent, stopped) == (text, matched)
    assert places == [place for place, end in enumerate(ends) if end <= len(text)]


@settings(max_examples=500, deadline=None)
@given(ids=sentencepiece_ids, stop=stops, cuts=st.lists(st.integers(0, 14), max_size=14))
def test_other_decoders_keep_the_rule(ids: list[int], stop: list[str], cuts: list[int]) -> None:
    """Tokens held for a run of bytes end with the text that resolves it, so that fewer ids may be sent with a match; never more."""
    text, matched = offline(SENTENCEPIECE.decode(ids), stop, 0)
    pieces = [piece for _, piece in run(Assembler(SENTENCEPIECE.detokenizer(), stop), ids, chunkings(len(ids), cuts)) if piece]
    places = [place for piece in pieces for place in piece.times_ns]
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.stop for piece in pieces if piece.stop] == ([matched] if matched else [])
    assert places == list(range(len(places)))
    if matched is None:
        assert len(places) == len(ids)
    else:
        assert SENTENCEPIECE.decode(ids[: len(places)]) == text[: len(SENTENCEPIECE.decode(ids[: len(places)]))]


def ids_of(*tokens: str) -> list[int]:
    return [token_id for token in tokens if (token_id := BYTE_LEVEL.library.token_to_id(token)) is not None]


def test_text_before_the_stop_in_the_same_token_is_sent_without_the_id() -> None:
    assembler = Assembler(BYTE_LEVEL.detokenizer(), ["bc"])
    assert assembler.push(ids_of("ca", "ab"), [1, 2]) == Piece(ids_of("ca"), "caa", [1])
    assert assembler.push(ids_of("c"), [3]) == Piece([], "", [], stop="bc")
    assert assembler.push(ids_of("a"), [4]) is None
    assert assembler.finish() is None


def test_tokens_pushed_with_the_stop_string_but_after_it_are_counted() -> None:
    assembler = Assembler(BYTE_LEVEL.detokenizer(), ["bc"])
    piece = assembler.push(ids_of("a", "b", "c", "a", "a"), [1, 2, 3, 4, 5])
    assert piece == Piece(ids_of("a"), "a", [1], stop="bc", unused=2)


def test_what_did_not_become_a_stop_string_is_sent() -> None:
    assembler = Assembler(BYTE_LEVEL.detokenizer(), ["abc"])
    assert assembler.push(ids_of("a", "b"), [1, 2]) is None
    assert assembler.push(ids_of("b"), [3]) == Piece(ids_of("a", "b", "b"), "abb", [1, 2, 3])
    assert assembler.push(ids_of("ab"), [4]) is None
    assert assembler.finish() == Piece(ids_of("ab"), "ab", [4])


@pytest.mark.parametrize("stop", [[], ["c"]])
def test_an_id_waits_for_the_end_of_its_character(stop: list[str]) -> None:
    assembler = Assembler(BYTE_LEVEL.detokenizer(), stop)
    assert assembler.push(ids_of("a", "aðŁ"), [1, 2]) == Piece(ids_of("a"), "aa", [1])
    assert assembler.push(ids_of("<s>"), [3]) is None
    assert assembler.push(ids_of("ĺĢ"), [4]) == Piece(ids_of("aðŁ", "<s>", "ĺĢ"), "😀", [2, 3, 4])
    assert assembler.finish() is None


def test_special_tokens_have_ids_and_no_text() -> None:
    assert Assembler(BYTE_LEVEL.detokenizer()).push(ids_of("<s>"), [1]) == Piece(ids_of("<s>"), "", [1])
    assert Assembler(BYTE_LEVEL.detokenizer(skip_special_tokens=False)).push(ids_of("<s>"), [1]) == Piece(ids_of("<s>"), "<s>", [1])


def test_min_tokens_counts_tokens_not_messages() -> None:
    assembler = Assembler(BYTE_LEVEL.detokenizer(), ["c"], min_tokens=2)
    assert assembler.push(ids_of("c", "c", "a", "c", "b"), [1, 2, 3, 4, 5]) == Piece(
        ids_of("c", "c", "a"), "cca", [1, 2, 3], stop="c", unused=1
    )
