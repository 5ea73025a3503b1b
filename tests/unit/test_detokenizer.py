"""Incremental detokenizing equals the library's decode of the whole, for every kind of decoder and every chunking."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from inference_service.text.detokenizer import ByteLevelDetokenizer, WindowDetokenizer
from inference_service.text.tokenizer import Tokenizer

WORDS = ["hello", "▁hello", "▁world", "lo", "▁", "▁▁", "▁▁a", ".", "é", "▁日本", "語", "\ufffd", "\n", "👩‍", "s\u0301"]


def byte_level() -> tokenizers.Tokenizer:
    """All bytes, some merged words with halves of characters, and added tokens within and beyond the byte alphabet."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    merged = ["he", "Ġthe", "ðŁ", "ðŁĺ", "Ģa", "æĹ¥", "ĠæĹ"]
    vocabulary = {token: token_id for token_id, token in enumerate([*sorted(alphabet), *merged])}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "<|end|>", "é"])
    library.add_tokens(["<tool call>", "ð", "日本", "Ġword"])
    return library


def sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 2 has it: Metaspace by replacement, bytes for what the vocabulary lacks, one leading space stripped."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: token_id for token_id, token in enumerate(["<unk>", *byte_tokens, *WORDS])}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(["<s>", "</s>"])
    library.add_tokens(["<tool>"])
    return library


def unigram_metaspace() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.Unigram([(word, -1.0) for word in WORDS], unk_id=0, byte_fallback=False))
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(["<s>"])
    return library


def wordpiece() -> tokenizers.Tokenizer:
    words = ["[UNK]", "the", "##s", "cat", ".", "'", "do", "n't", "##ing", "日", "!"]
    library = tokenizers.Tokenizer(models.WordPiece(vocab={word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    library.add_special_tokens(["[SEP]"])
    return library


def no_decoder() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordLevel(vocab={word: n for n, word in enumerate(WORDS)}, unk_token="hello"))


LIBRARIES = {make.__name__: make() for make in (byte_level, sentencepiece, unigram_metaspace, wordpiece, no_decoder)}
TOKENIZERS = {name: Tokenizer(library, {}, {}) for name, library in LIBRARIES.items()}


def chunkings(ids: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:stop] for start, stop in pairwise(bounds)]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_decode_of_the_whole(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    # Beyond the vocabulary too: a model's embedding is often padded.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    skip = data.draw(st.booleans())
    detokenizer = tokenizer.detokenizer(skip)
    pieces = [detokenizer.push(chunk) for chunk in chunkings(ids, data.draw(st.lists(st.integers(0, 40), max_size=8)))]
    assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode(ids, skip)
    assert detokenizer.held_tokens == 0


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("ab é日本語😀👩‍👩‍👧é́ 한\n"), max_size=20), cuts=st.lists(st.integers(0, 80), max_size=8))
def test_whole_characters_are_never_split(name: str, text: str, cuts: list[int]) -> None:
    library, tokenizer = LIBRARIES[name], TOKENIZERS[name]
    ids = [id_of(library, token) for token in single_bytes(name, text)]
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    pieces = [detokenizer.push(chunk) for chunk in chunkings(ids, cuts)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode(ids, skip_special_tokens=False)


def id_of(library: tokenizers.Tokenizer, token: str) -> int:
    token_id = library.token_to_id(token)
    assert token_id is not None
    return token_id


def single_bytes(name: str, text: str) -> list[str]:
    """A text as tokens of one byte each."""
    if name == "sentencepiece":
        return [f"<0x{byte:02X}>" for byte in text.encode()]
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [character for word, _ in splitter.pre_tokenize_str(text) for character in word]


def test_kinds() -> None:
    assert isinstance(TOKENIZERS["byte_level"].detokenizer(), ByteLevelDetokenizer)
    assert all(isinstance(TOKENIZERS[name].detokenizer(), WindowDetokenizer) for name in TOKENIZERS if name != "byte_level")


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_held_tokens_are_those_of_the_unfinished_character(name: str) -> None:
    library, detokenizer = LIBRARIES[name], TOKENIZERS[name].detokenizer()
    tokens = ["ð", "Ł", "ĺ", "Ģ", "h"] if name == "byte_level" else ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "hello"]
    ids = [id_of(library, token) for token in tokens]
    held = []
    for token_id in ids:
        detokenizer.push([token_id])
        held.append(detokenizer.held_tokens)
    # A run of byte tokens is readable only when it has ended.
    assert held == ([1, 2, 3, 0, 0] if name == "byte_level" else [1, 2, 3, 4, 0])


def test_a_token_may_end_one_character_and_begin_the_next() -> None:
    library, detokenizer = LIBRARIES["byte_level"], TOKENIZERS["byte_level"].detokenizer()
    first, second = id_of(library, "ĠæĹ"), id_of(library, "¥")
    assert detokenizer.push([first]) == " "
    assert detokenizer.held_tokens == 1
    assert detokenizer.push([second, second]) == "日\ufffd"
    assert detokenizer.held_tokens == 0
