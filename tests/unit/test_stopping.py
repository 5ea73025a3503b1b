"""Stop strings: the same match, and the same text, whatever the pieces."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference_service.text.stopping import StopMatcher


def offline(text: str, stop: list[str], checked_from: int = 0) -> tuple[str, str | None]:
    """The rule itself, over the whole text: of all occurrences that end beyond `checked_from` the first to end, of those the longest."""
    for end in range(checked_from + 1, len(text) + 1):
        for string in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(string):
                return text[: end - len(string)], string
    return text, None


def stream(pieces: list[str], stop: list[str], unmatched_pieces: int = 0) -> tuple[str, str | None, list[str]]:
    matcher = StopMatcher(stop)
    sent: list[str] = []
    for number, piece in enumerate(pieces):
        certain, matched = matcher.push(piece, number >= unmatched_pieces)
        sent.append(certain)
        if matched is not None:
            return "".join(sent), matched, sent
    sent.append(matcher.flush())
    return "".join(sent), None, sent


def every_chunking(text: str) -> list[list[str]]:
    if not text:
        return [[]]
    return [[text[:size], *rest] for size in range(1, len(text) + 1) for rest in every_chunking(text[size:])]


letters = st.text("abc", max_size=9)
stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(text=letters, stop=stops)
@example(text="abcab", stop=["abcabc", "bca", "ca"])
@example(text="aabaaab", stop=["aaab"])
def test_every_chunking_gives_the_offline_result(text: str, stop: list[str]) -> None:
    for pieces in every_chunking(text):
        assert stream(pieces, stop)[:2] == offline(text, stop)


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(st.text("ab", max_size=4), max_size=12), stop=stops, unmatched=st.integers(0, 12))
def test_unmatched_pieces(pieces: list[str], stop: list[str], unmatched: int) -> None:
    """A stop string that ends within them is text; one that only begins there still matches."""
    checked_from = len("".join(pieces[:unmatched]))
    assert stream(pieces, stop, unmatched)[:2] == offline("".join(pieces), stop, checked_from)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.text("abc", max_size=4), max_size=12), stop=stops)
def test_no_more_is_held_than_may_begin_a_stop_string(pieces: list[str], stop: list[str]) -> None:
    matcher, text, sent = StopMatcher(stop), "", ""
    for piece in pieces:
        text += piece
        certain, matched = matcher.push(piece)
        sent += certain
        if matched is not None:
            return
        held = text[len(sent) :]
        tails = [text[start:] for start in range(len(text)) if any(string.startswith(text[start:]) for string in stop)]
        assert held == (tails[0] if tails else "")


def test_an_ignored_match_that_nothing_can_continue_is_not_held() -> None:
    matcher = StopMatcher(["ab", "bcd"])
    assert matcher.push("xab", may_match=False) == ("xa", None), "only the b may begin another"
    assert matcher.push("z") == ("bz", None)


@pytest.mark.parametrize(
    ("pieces", "stop", "sent", "matched"),
    [
        (["Hello\n", "\nUser:"], ["\n\n", "User"], "Hello", "\n\n"),
        (["a 日", "本語"], ["本"], "a 日", "本"),
        (["xabcd"], ["abcd", "bc"], "xa", "bc"),
        (["xabc"], ["c", "abc", "bc"], "x", "abc"),
        (["aaa", "b"], ["aab"], "a", "aab"),
        (["STO", "NE", " STO"], ["STOP"], "STONE STO", None),
    ],
)
def test_examples(pieces: list[str], stop: list[str], sent: str, matched: str | None) -> None:
    assert stream(pieces, stop)[:2] == (sent, matched)


def test_text_that_cannot_begin_a_stop_string_passes_at_once() -> None:
    assert stream(["one ", "two", "\n", "three"], ["\n\n"])[2] == ["one ", "two", "", "\nthree", ""]


def test_long_stop_strings_take_linear_time() -> None:
    """A quadratic matcher would look at some 10^10 characters here."""
    stop = "a" * 100_000 + "b"
    assert stream(["a" * 150_000, "b"], [stop])[:2] == ("a" * 50_000, stop)
