"""Guides and the process that makes their masks, for real: SmolLM2's tokenizer, processes killed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
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
    deadline = time.monotonic() + 60
    while not all(guide.ready or guide.error for guide in guides):
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


@pytest.mark.parametrize(
    ("kind", "text", "error"),
    [
        ("grammar", 'root ::= "a" | b', 'EBNF parser error at line 1, column 16: Rule "b" is not defined'),
        ("regex", "x(a", "Regex parsing error at position 4: The parenthesis is not closed."),
        ("json_schema", '{"type": "objec"}', 'Unsupported type "objec"'),
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
        feed(grammars, good, tokenizer, "ab")
        assert good.ended
    finally:
        grammars.close()
