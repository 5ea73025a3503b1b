"""Guides and the process that makes their masks, for real: SmolLM2's tokenizer, processes killed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from inference_service.engine import grammars as module
from inference_service.engine.grammars import Grammars, Guide
from inference_service.fetch import resolve_model
from inference_service.messages import Grammar

VOCABULARY = 49152
END = 2


@pytest.fixture(scope="module")
def directory() -> Path:
    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(directory: Path) -> Iterator[Grammars]:
    grammars = Grammars(str(directory), VOCABULARY)
    yield grammars
    grammars.close()


def wait(grammars: Grammars, *guides: Guide) -> None:
    wait_until(grammars, lambda: all(guide.ready or guide.error for guide in guides))


def wait_until(grammars: Grammars, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        list(grammars.poll())
        time.sleep(0.002)


def start(grammars: Grammars, kind: str, text: str, ignore_end: bool = False) -> Guide:
    guide = grammars.start(Grammar(kind, text, [END], ignore_end))
    wait(grammars, guide)
    return guide


def allowed(guide: Guide) -> set[int]:
    return {8 * place + bit for place, byte in enumerate(guide.allowed) if byte for bit in range(8) if byte >> bit & 1}


def feed(grammars: Grammars, guide: Guide, tokenizer: Tokenizer, text: str) -> None:
    for token_id in tokenizer.encode(text).ids:
        assert token_id in allowed(guide)
        grammars.advance(guide, token_id)
        wait(grammars, guide)


def test_a_mask_permits_what_continues_the_text_and_nothing_else(grammars: Grammars, tokenizer: Tokenizer) -> None:
    guide = start(grammars, "choices", json.dumps(["yes", "yesterday", 'a "b"\n']))
    texts = {tokenizer.decode([token_id], skip_special_tokens=False) for token_id in allowed(guide)}
    assert texts == {text[:count] for text in ("yes", "yesterday", 'a "b"\n') for count in range(1, 10)} & texts
    assert {"y", "yes", "a"} <= texts
    feed(grammars, guide, tokenizer, "yes")
    assert END in allowed(guide) and not guide.ended, "yes may go on to yesterday"
    feed(grammars, guide, tokenizer, "terday")
    assert allowed(guide) == {END} and guide.ended


def test_the_end_is_not_permitted_where_it_is_ignored(grammars: Grammars, tokenizer: Tokenizer) -> None:
    guide = start(grammars, "regex", "[ab]{1,2}", ignore_end=True)
    feed(grammars, guide, tokenizer, "a")
    assert END not in allowed(guide) and not guide.ended
    feed(grammars, guide, tokenizer, "b")
    assert guide.ended


def test_special_tokens_do_not_pass_for_the_text_of_their_names(grammars: Grammars, tokenizer: Tokenizer) -> None:
    guide = start(grammars, "regex", ".*")
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert len(special) > 10 and special & allowed(guide) == {END}


def test_a_string_of_limited_length_has_no_control_characters(grammars: Grammars, tokenizer: Tokenizer) -> None:
    guide = start(grammars, "json_schema", '{"type": "string", "maxLength": 8}')
    feed(grammars, guide, tokenizer, '"')
    texts = tokenizer.decode_batch([[token_id] for token_id in allowed(guide)])
    assert "ab" in texts and not {character for text in texts for character in text if character < " "}


@pytest.mark.parametrize(
    ("kind", "text", "error"),
    [
        ("grammar", 'root ::= "a" | b', 'EBNF parser error at line 1, column 16: Rule "b" is not defined'),
        ("regex", "x(a", "Regex parsing error at position 4: The parenthesis is not closed."),
        ("json_schema", '{"type": "objec"}', 'Unsupported type "objec"'),
        ("grammar", "root ::= root", "permits neither a further token after 0 of them, nor the end"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_place(grammars: Grammars, kind: str, text: str, error: str) -> None:
    assert start(grammars, kind, text).error == error


def test_answers_go_on_after_the_process_was_killed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    ready, waiting = start(grammars, "regex", "[0-9]{4}"), start(grammars, "regex", "[a-z]{2}")
    feed(grammars, waiting, tokenizer, "a")
    assert grammars._process is not None
    grammars._process.kill()
    grammars._process.join()
    grammars.advance(waiting, tokenizer.encode("b").ids[0])
    wait(grammars, waiting)
    assert waiting.ended and not waiting.error
    feed(grammars, ready, tokenizer, "7")
    assert not ready.error and not ready.ended


def test_a_grammar_that_compiles_too_long_is_refused_and_the_others_go_on(
    directory: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPILE_S", 0.2)
    grammars = Grammars(str(directory), VOCABULARY)
    try:
        good = start(grammars, "choices", '["ab"]')
        slow = grammars.start(Grammar("regex", "[a-z]{1,60000}", [END]))
        wait(grammars, slow)
        assert slow.error == "takes more than 0.2 s to compile"
        process = grammars._process
        grammars.end(slow)
        feed(grammars, good, tokenizer, "ab")
        assert good.ended and grammars._process is process

        given_up = grammars.start(Grammar("regex", "[a-y]{1,60000}", [END]))
        wait_until(grammars, lambda: bool(grammars._busy))
        grammars.end(given_up)
        wait_until(grammars, lambda: grammars._process is not process)
    finally:
        grammars.close()


def test_a_mask_that_takes_too_long_neither_stops_the_engine_nor_the_others(
    grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work for this grammar's masks grows fivefold with each token; what is sent meanwhile is more than a pipe holds."""
    monkeypatch.setattr(module, "MASK_S", 0.5)
    doubled = "".join(f"r{depth} ::= r{depth + 1} r{depth + 1}\n" for depth in range(40))
    slow = start(grammars, "grammar", f'root ::= r0\n{doubled}r40 ::= "a" | ""')
    good = start(grammars, "choices", '["ab"]')
    for _ in range(6):
        grammars.advance(slow, tokenizer.encode("aaaa").ids[0])
    large = [grammars.start(Grammar("grammar", f'root ::= "{letter * 60_000}"', [END])) for letter in "bcdefgh"]
    wait(grammars, slow, *large)
    assert slow.error == "takes more than 0.5 s for a token"
    assert not any(guide.error for guide in large)
    feed(grammars, good, tokenizer, "ab")
    for guide in (slow, good, *large):
        grammars.end(guide)


def test_what_was_at_work_when_the_process_ended_is_at_fault_the_second_time(grammars: Grammars) -> None:
    guide = grammars.start(Grammar("regex", "[a-z]{1,50000}", [END]))
    for error in ("", "crashes the compiler"):
        wait_until(grammars, lambda: guide.key in grammars._busy)
        process = grammars._process
        assert process is not None and not guide.error
        process.kill()
        wait_until(grammars, lambda: not grammars._busy)
        assert guide.error == error and grammars._process is not process
    grammars.end(guide)
