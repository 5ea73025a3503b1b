"""Every kind of tokenizer files: ids and text equal the library that the files come from, and detokenizing goes piece by piece."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_service.engine.grammars import Grammars
from inference_service.fetch import fetch
from inference_service.messages import Grammar
from inference_service.text.assembler import Assembler
from inference_service.text.tokenizer import Tokenizer, TokenizerError
from tests.unit.test_assembler import offline
from tests.unit.test_detokenizer import chunkings
from tests.unit.test_grammars import allowed, wait
from tests.unit.tokenizer_kinds import KINDS, LLAMA3_SPLIT, TEXTS, added, byte_level_bpe, gpt2, llama3, ranks, write_json

SMOLLM2 = "smollm2-135m-instruct"


@dataclass
class Kind:
    """A model directory, and its tokenizer as we read it."""

    name: str
    directory: Path

    @cached_property
    def ours(self) -> Tokenizer:
        return Tokenizer.load(self.directory)

    @cached_property
    def theirs(self) -> Any:
        return transformers.AutoTokenizer.from_pretrained(str(self.directory))

    @property
    def texts(self) -> list[str]:
        """The corpus, then texts with each of the added tokens in and around words."""
        added = [token.content for token in self.ours.library.get_added_tokens_decoder().values()][:24]
        return [*TEXTS, *(f"a{token} b {token}c{token}{token}\n {token} 日本{token}" for token in added)]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of converted tokenizers that holds nothing."""
    smollm2 = fetch(SMOLLM2)
    directory = tmp_path_factory.mktemp("cache")
    (directory / "models").mkdir()
    (directory / "models" / SMOLLM2).symlink_to(smollm2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFERENCE_SERVICE_CACHE", str(directory))
        # Else the reader of ranks would take a file for an earlier one of the same path.
        patch.setenv("TIKTOKEN_CACHE_DIR", "")
        yield directory


@pytest.fixture(scope="module", params=[*KINDS, SMOLLM2])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    name = request.param
    if name == SMOLLM2:
        return Kind(name, fetch(name))
    directory = tmp_path_factory.mktemp(name)
    KINDS[name](directory)
    return Kind(name, directory)


def test_ids_and_text_equal_transformers(kind: Kind) -> None:
    if kind.name == "unigram_llama":
        pytest.skip("transformers reads this one as BPE; sentencepiece itself is its reference")
    assert kind.ours.library.get_vocab() == kind.theirs.get_vocab()
    for text in kind.texts:
        for add in (True, False):
            assert kind.ours.encode(text, add) == kind.theirs.encode(text, add_special_tokens=add), text
        ids = kind.ours.encode(text)
        for skip in (True, False):
            expected = kind.theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert kind.ours.decode(ids, skip) == expected, text


def test_what_transformers_saves_is_read_alike(kind: Kind, tmp_path: Path) -> None:
    """A tokenizer.json with every added token in tokenizer_config.json: none is added twice, nor matched otherwise."""
    if kind.name == "unigram_llama":
        pytest.skip("transformers reads this one as BPE")
    kind.theirs.save_pretrained(tmp_path)
    saved = Tokenizer.load(tmp_path)
    assert all(saved.encode(text) == kind.ours.encode(text) for text in kind.texts)
    assert (saved.special_ids, saved.bos_token_id, saved.vocab_size) == (
        kind.ours.special_ids,
        kind.ours.bos_token_id,
        kind.ours.vocab_size,
    )


def test_ids_equal_the_library_that_the_files_come_from(kind: Kind) -> None:
    if kind.name == "llama3":
        table = ranks()
        special = {token: token_id for token, token_id in kind.ours.library.get_vocab().items() if token_id >= len(table)}
        reference = tiktoken.Encoding("llama3", pat_str=LLAMA3_SPLIT, mergeable_ranks=table, special_tokens=special)
        assert all(kind.ours.encode(text, False) == reference.encode(text, allowed_special="all") for text in kind.texts)
    elif kind.name in ("gpt2", "tokenizer_json"):
        library = byte_level_bpe()
        assert all(kind.ours.encode(text, False) == library.encode(text).ids for text in TEXTS)
    elif kind.name != SMOLLM2:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(kind.directory / "tokenizer.model"))
        # Where a text begins with a blank, transformers (and so every server with it) adds none before it.
        texts = [text for text in TEXTS if not text.startswith((" ", "▁"))]
        assert all(kind.ours.encode(text, False) == pieces.encode(text) for text in texts)


def test_special_tokens_are_what_the_files_say(kind: Kind) -> None:
    roles = {
        "llama2": ("<s>", "</s>"),
        "mistral": ("<s>", "</s>"),
        "gemma": ("<bos>", "<eos>"),
        "unigram": (None, "</s>"),
        "unigram_llama": ("<s>", "</s>"),
        "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
        "gpt2": ("<|endoftext|>", "<|endoftext|>"),
        "tokenizer_json": ("<|bos|>", "<|endoftext|>"),
        SMOLLM2: ("<|im_start|>", "<|im_end|>"),
    }
    bos, eos = (token and kind.ours.library.token_to_id(token) for token in roles[kind.name])
    assert (kind.ours.bos_token_id, kind.ours.eos_token_ids) == (bos, [eos])
    assert {eos} <= kind.ours.special_ids >= {bos} - {None}
    begins_with_bos = kind.name not in ("unigram", "gpt2", "tokenizer_json", SMOLLM2)
    assert (kind.ours.encode("text")[0] == bos) == begins_with_bos
    assert (kind.ours.encode("text")[-1] == eos) == (kind.name in ("mistral", "unigram"))
    tool = kind.ours.library.token_to_id("<tool>")
    assert tool is None or (tool not in kind.ours.special_ids and kind.ours.decode([tool]).strip() == "<tool>")


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_random_ids_piece_by_piece_equal_the_whole(kind: Kind, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, kind.ours.vocab_size + 2), max_size=40))
    check_pieces(kind, ids, data)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_texts_piece_by_piece_equal_the_whole(kind: Kind, data: st.DataObject) -> None:
    ids = kind.ours.encode(data.draw(st.sampled_from(kind.texts)))
    start = data.draw(st.integers(0, len(ids)))
    check_pieces(kind, ids[start:], data)


def check_pieces(kind: Kind, ids: list[int], data: st.DataObject) -> None:
    """The pieces of any chunking join to the whole text, up to a stop string that is in it or is not."""
    skip = data.draw(st.booleans())
    text = kind.ours.decode(ids, skip)
    cuts = chunkings(ids, data.draw(st.lists(st.integers(0, 40), max_size=8)))
    detokenizer = kind.ours.detokenizer(skip)
    pieces = [detokenizer.push(chunk) for chunk in cuts]
    assert "".join([*pieces, detokenizer.flush()]) == text
    begin = data.draw(st.integers(0, len(text)))
    stop = [string for string in (text[begin : begin + data.draw(st.integers(1, 5))], "</s>", "の") if string]
    assembler = Assembler(kind.ours.detokenizer(skip), stop)
    found = [piece for chunk in cuts if (piece := assembler.push(chunk, [0] * len(chunk)))]
    if (last := assembler.finish()) is not None:
        found.append(last)
    matched = next((piece.stop for piece in found if piece.stop), None)
    assert ("".join(piece.text for piece in found), matched) == offline(text, stop, 0)


def test_a_conversion_is_made_once_for_the_same_content(tmp_path: Path, cache: Path) -> None:
    """A class that cannot read the files is passed over, too: Llama's does not know vocab.json."""
    made = tmp_path / "made"
    made.mkdir()
    gpt2(made, tokenizer_class=None)
    tokenizer = Tokenizer.load(made)
    assert all(tokenizer.encode(text) == byte_level_bpe().encode(text).ids for text in TEXTS[:4])
    kept = set((cache / "tokenizers").iterdir())
    shutil.copytree(made, tmp_path / "copy")
    assert Tokenizer.load(tmp_path / "copy").library.get_vocab() == tokenizer.library.get_vocab()
    assert set((cache / "tokenizers").iterdir()) == kept
    assert sorted(os.listdir(made)) == ["config.json", "merges.txt", "tokenizer_config.json", "vocab.json"]
    write_json(made, "tokenizer_config.json", {"eos_token": "<|other|>"})
    changed = Tokenizer.load(made)
    assert changed.eos_token_ids == [changed.library.token_to_id("<|other|>")]
    assert len(set((cache / "tokenizers").iterdir()) - kept) == 1


def test_ranks_may_have_a_name_of_their_own(tmp_path: Path) -> None:
    llama3(tmp_path, "llama.tiktoken")
    reference = tiktoken.Encoding("llama3", pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks(), special_tokens={})
    tokenizer = Tokenizer.load(tmp_path)
    assert all(tokenizer.encode(text, False) == reference.encode(text, disallowed_special=()) for text in TEXTS)


def test_code_of_the_model_is_never_run(tmp_path: Path) -> None:
    gpt2(tmp_path)
    code = f"open({str(tmp_path / 'was-run')!r}, 'w')\nclass Own:\n    pass\n"
    (tmp_path / "own.py").write_text(code)
    auto_map = {"AutoTokenizer": ["own.Own", None], "AutoConfig": "own.Own"}
    write_json(tmp_path, "tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": auto_map})
    write_json(tmp_path, "config.json", {"model_type": "own", "auto_map": auto_map})
    Tokenizer.load(tmp_path)
    assert not (tmp_path / "was-run").exists()


def without_added_tokens(directory: Path) -> None:
    llama3(directory)
    write_json(directory, "tokenizer_config.json", {})


def of_another_family(directory: Path) -> None:
    llama3(directory, "qwen.tiktoken")
    write_json(directory, "config.json", {"model_type": "qwen"})


def cut_off(directory: Path) -> None:
    llama3(directory)
    (directory / "tokenizer.model").write_text("IQ== 0\nIg== 1\nIw=")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda d: None, r"tokenizer\.json: no such file, nor tokenizer\.model"),
        (lambda d: (d / "vocab.json").write_text("{}"), r"merges\.txt: no such file, which vocab\.json needs"),
        (lambda d: (d / "tokenizer.model").write_bytes(b""), r"tokenizer\.model: cannot be converted: .*neither a SentencePiece model"),
        (lambda d: (d / "tokenizer.model").write_bytes(bytes(range(256))), r"tokenizer\.model: .*neither a SentencePiece model nor"),
        (without_added_tokens, r"tokenizer\.model: .*special tokens; tokenizer_config\.json must list them as added_tokens_decoder"),
        (of_another_family, r"qwen\.tiktoken: .*known for Llama 3 .*'qwen'"),
        (cut_off, r"tokenizer\.model: .*line 3 is no tiktoken rank"),
    ],
)
def test_what_cannot_be_converted_names_the_file(tmp_path: Path, write: Any, message: str) -> None:
    write(tmp_path)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(tmp_path)


def test_bad_added_tokens_name_the_file(tmp_path: Path) -> None:
    KINDS["tokenizer_json"](tmp_path)
    write_json(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": {"x": added("<x>", True)}})
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: the tokens that it adds"):
        Tokenizer.load(tmp_path)


def test_grammars_know_a_converted_tokenizer(tmp_path: Path) -> None:
    """A mask has exactly the tokens whose bytes begin one of the choices, bytes of unknown characters among them."""
    KINDS["llama2"](tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    grammars = Grammars(str(tmp_path), tokenizer.vocab_size)
    choices = ["東京 quick", "ἐ"]
    try:
        guide = grammars.start(Grammar("choices", json.dumps(choices), tokenizer.eos_token_ids))
        wait(grammars, guide)
        assert guide.error == ""
        bytes_of = {token_id: piece_bytes(piece) for piece, token_id in tokenizer.library.get_vocab().items()}
        expected = {token_id for token_id, text in bytes_of.items() if any(choice.encode().startswith(text) for choice in choices)}
        assert allowed(guide) == expected
        assert len(expected) >= 2
    finally:
        grammars.close()


def piece_bytes(piece: str) -> bytes:
    byte = re.fullmatch("<0x(..)>", piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace("▁", " ").encode()
