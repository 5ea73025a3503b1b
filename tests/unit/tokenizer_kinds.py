"""Small model directories with the tokenizer files of each kind, trained by the libraries that such files come from."""

# ruff: noqa: RUF001
from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from inference_service.text.detokenizer import byte_alphabet

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog's owner said: it's 1,234.56 dollars!",
    "Portez ce vieux whisky au juge blond qui fume ; l'été, à Noël, où naïveté et cœur vont.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Straßenbahnübergänge!",
    "El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia y frío, ¿añoraba? ¡Sí!",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία, και η ζωή συνεχίζεται.",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน",
    "いろはにほへと ちりぬるを 我が世誰ぞ常ならむ。東京都は日本の首都です。",
    "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。我们今天去北京大学。",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "def f(x):\n\treturn {'a': x ** 2}  # two  spaces\n\n\nprint(f(10_000))\r\n",
    "Tiếng Việt có nhiều dấu: ă â đ ê ô ơ ư, và thanh điệu. e\u0301 n\u0303 ﬁ Å",
]
UNSEEN = [
    "",
    " ",
    "  leading, trailing and   inner spaces  ",
    "\n\n\ttabs\tand\r\nlines\n",
    "👩‍👩‍👧 🇩🇪 😀 ☃️ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u200b\ufeff",
    "¼ ½ ① Ⅷ ㎏ ｆｕｌｌ　ｗｉｄｔｈ",
    "ქართული ენა, Հայերեն, አማርኛ, བོད་ཡིག, ᐃᓄᒃᑎᑐᑦ",
    "▁ the mark itself ▁▁ and Ġ and <0x0A> and </w>",
    "http://example.org/a?b=c&d=%20 3.14159e-10 0xDEADBEEF",
]
TEXTS = [*CORPUS, *UNSEEN]
CHAT_TOKENS = ["<|im_start|>", "<|im_end|>"]
LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def write_json(directory: Path, name: str, content: dict[str, Any]) -> None:
    (directory / name).write_text(json.dumps(content))


def added(token: str, special: bool) -> dict[str, Any]:
    return {"content": token, "special": special, "normalized": not special, "lstrip": False, "rstrip": False, "single_word": False}


def train_sentencepiece(directory: Path, **options: Any) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, hard_vocab_limit=False, num_threads=1, minloglevel=2, **options
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())


LLAMA2_OPTIONS: dict[str, Any] = {
    "model_type": "bpe",
    "vocab_size": 900,
    "byte_fallback": True,
    "character_coverage": 0.98,
    "split_digits": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
}


def llama2(directory: Path) -> None:
    """SentencePiece BPE with byte fallback, a leading space, and tokens added after it."""
    train_sentencepiece(directory, **LLAMA2_OPTIONS)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model")).get_piece_size()
    write_json(directory, "config.json", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    decoder = {str(n): added(token, True) for n, token in enumerate(["<unk>", "<s>", "</s>"])}
    decoder |= {str(pieces): added("<tool>", False), str(pieces + 1): added("<|end|>", True)}
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(
        directory,
        "tokenizer_config.json",
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False, "added_tokens_decoder": decoder, **roles},
    )


def mistral(directory: Path) -> None:
    """The same vocabulary for a model type whose tokenizer class is another; tokens added by the older files."""
    train_sentencepiece(directory, **LLAMA2_OPTIONS)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model")).get_piece_size()
    write_json(directory, "config.json", {"model_type": "mistral", "architectures": ["MistralForCausalLM"]})
    write_json(directory, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True})
    write_json(directory, "special_tokens_map.json", {"bos_token": "<s>", "eos_token": added("</s>", True), "unk_token": "<unk>"})
    write_json(directory, "added_tokens.json", {"<tool>": pieces})


def gemma(directory: Path) -> None:
    """SentencePiece BPE without a leading space, its chat tokens pieces of its own."""
    options = LLAMA2_OPTIONS | {"add_dummy_prefix": False, "user_defined_symbols": ["<start_of_turn>", "<end_of_turn>", "\n\n"]}
    train_sentencepiece(directory, pad_id=0, eos_id=1, bos_id=2, unk_id=3, bos_piece="<bos>", eos_piece="<eos>", **options)
    write_json(directory, "config.json", {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]})
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    extra = {"additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]}
    write_json(directory, "tokenizer_config.json", {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, **roles, **extra})


def unigram(directory: Path) -> None:
    """SentencePiece Unigram as T5 has it: NFKC, blanks collapsed, unknown characters lost."""
    train_sentencepiece(directory, model_type="unigram", vocab_size=500, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    write_json(directory, "config.json", {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]})
    write_json(directory, "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "extra_ids": 10})


def unigram_llama(directory: Path) -> None:
    """A Unigram vocabulary under a class that knows BPE alone."""
    train_sentencepiece(directory, **LLAMA2_OPTIONS | {"model_type": "unigram"})
    write_json(directory, "config.json", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    write_json(directory, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>"})


def byte_level_bpe(split: str | None = None) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    parts = [pre_tokenizers.Split(tokenizers.Regex(split), "isolated"), byte_level] if split else [byte_level]
    library.pre_tokenizer = pre_tokenizers.Sequence(parts)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    return library


def ranks() -> dict[bytes, int]:
    """Of tiktoken: the bytes come first, then what each merge makes, in order."""
    vocabulary = sorted(byte_level_bpe(LLAMA3_SPLIT).get_vocab().items(), key=lambda item: item[1])
    byte_of = byte_alphabet()
    return {bytes(byte_of[character] for character in token): rank for token, rank in vocabulary}


def llama3(directory: Path, name: str = "tokenizer.model") -> None:
    """tiktoken ranks, and the special tokens beside them."""
    table = ranks()
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in table.items()]
    (directory / name).write_text("".join(lines))
    write_json(directory, "config.json", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    roles = {"bos_token": special[0], "eos_token": special[2]}
    decoder = {str(len(table) + n): added(token, True) for n, token in enumerate(special)}
    write_json(
        directory,
        "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "added_tokens_decoder": decoder, **roles},
    )


def gpt2(directory: Path, tokenizer_class: str | None = "GPT2Tokenizer") -> None:
    """vocab.json and merges.txt."""
    byte_level_bpe().model.save(str(directory))
    write_json(directory, "config.json", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    config: dict[str, Any] = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "additional_special_tokens": CHAT_TOKENS}
    write_json(directory, "tokenizer_config.json", config | ({"tokenizer_class": tokenizer_class} if tokenizer_class else {}))


def tokenizer_json(directory: Path) -> None:
    """tokenizer.json, which lacks tokens that the other files declare."""
    library = byte_level_bpe()
    library.add_special_tokens(["<|endoftext|>"])
    library.add_tokens([AddedToken("<tool>", special=False)])
    library.save(str(directory / "tokenizer.json"))
    write_json(directory, "config.json", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|endoftext|>"}
    write_json(directory, "tokenizer_config.json", config | {"additional_special_tokens": CHAT_TOKENS})
    write_json(directory, "added_tokens.json", {"<|more|>": library.get_vocab_size() + 3})


KINDS = {make.__name__: make for make in (llama2, mistral, gemma, unigram, unigram_llama, llama3, gpt2, tokenizer_json)}
