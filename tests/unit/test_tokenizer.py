"""The tokenizer and the chat templates equal `transformers` on the same files."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from inference_service.fetch import fetch
from inference_service.text.chat_template import ChatTemplateError
from inference_service.text.tokenizer import SamplingDefaults, Tokenizer, TokenizerError

TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing ",
    "naïve 日本語 👩‍👩‍👧 é\u0301\n\n\ttab",
    "<|im_start|>user\nhi<|im_end|>",
    "<script>&'\"</script>",
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 1 + 1? "}, {"role": "assistant", "content": "It is "}],
    [{"role": "user", "content": "a\n"}, {"role": "assistant", "content": "日本 <b>&amp;</b>"}, {"role": "user", "content": "{{ x }}"}],
]
TEMPLATES = {
    "loops": """{%- for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
{{ loop.index0 }}:{{ bos_token }}{{ message['content'] | trim }}{{ eos_token }}
{%- endfor %}
    {% if add_generation_prompt %}
assistant:
    {% endif %}""",
    "namespace": """{% set ns = namespace(system='none', turns=0) %}
{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}
{% else %}{% set ns.turns = ns.turns + 1 %}{% endif %}{% endfor %}
[{{ ns.system }}|{{ ns.turns }}]{% for m in messages[::-1] %}{{ m.content }};{% endfor %}""",
    "tojson": """{{ messages | tojson }}{{ messages | tojson(indent=2) }}{% if tools %}{{ tools | tojson(sort_keys=true) }}{% endif %}
{{- {'a': 'é<>'} | tojson(ensure_ascii=true) }}""",
    "generation": """{% set x = 1 %}{% for m in messages %}
{% generation %}{% set x = 2 %}{{ m.content }}{% endgeneration %}{{ x }}{% endfor %}""",
    "date": """{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools is none }}{{ undefined_name }}""",
    "variables": """{% for m in messages %}{{ m.content }}{% endfor %}
{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}""",
    "macro": """{% macro turn(m, last=false) %}<{{ m.role | upper }}>{{ m.content }}{{ '' if last else '\\n' }}{% endmacro %}
{%- for m in messages %}{{ turn(m, loop.last) }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}""",
}


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return fetch("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def ours(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(str(smollm2))


def write_model(directory: Path, tokenizer_config: dict[str, Any], **files: dict[str, Any]) -> Path:
    """A model directory with a small tokenizer that puts a bos token before texts."""
    words = {word: n for n, word in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = tokenizers.Tokenizer(models.BPE(vocab=words, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>"])
    library.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", library.token_to_id("<s>"))])
    library.enable_truncation(4)
    library.save(str(directory / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special, **tokenizer_config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_transformers(ours: Tokenizer, theirs: Any, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert [ours.token_text(token_id) for token_id in ids] == [theirs.decode([token_id]) for token_id in ids]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_smollm2_chat_equals_transformers(ours: Tokenizer, theirs: Any, chat: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    text = theirs.apply_chat_template(chat, add_generation_prompt=add_generation_prompt, tokenize=False)
    assert ours.render_chat(chat, add_generation_prompt) == text
    ids = theirs.apply_chat_template(chat, add_generation_prompt=add_generation_prompt, return_dict=False)
    assert ours.encode_chat(chat, add_generation_prompt) == ids


@pytest.mark.parametrize("name", ["smollm2", *TEMPLATES])
def test_every_template_equals_transformers(tmp_path: Path, ours: Tokenizer, theirs: Any, name: str) -> None:
    if name != "smollm2":
        write_model(tmp_path, {"chat_template": TEMPLATES[name]})
        ours, theirs = Tokenizer.load(tmp_path), PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    variables: dict[str, Any] = {"enable_thinking": False, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
    for chat in CHATS:
        for given in ({}, variables):
            for add in (True, False):
                expected = theirs.apply_chat_template(chat, add_generation_prompt=add, tokenize=False, **given)
                assert ours.render_chat(chat, add, **given) == expected
        assert ours.encode_chat(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("name", ["smollm2", "loops", "variables", "macro"])
def test_continuing_the_final_message_equals_transformers(tmp_path: Path, ours: Tokenizer, theirs: Any, name: str) -> None:
    if name != "smollm2":
        write_model(tmp_path, {"chat_template": TEMPLATES[name]})
        ours, theirs = Tokenizer.load(tmp_path), PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, continue_final_message=True, tokenize=False)
        assert ours.render_chat(chat, False, True) == expected
        assert chat[-1]["content"] in CHATS[CHATS.index(chat)][-1]["content"], "the caller's messages are left alone"


@pytest.mark.parametrize(
    ("template", "arguments", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", {}, "^Roles must alternate$"),
        ("{{ messages[9].content }}", {}, "has no element 9"),
        ("{% for m in messages %}", {}, "does not compile"),
        ("{{ ''.__class__.__mro__ }}", {}, "unsafe"),
        ("{% set n = namespace(_x=1) %}", {}, "_x"),
        ("{{ messages.append(1) }}", {}, "unsafe"),
        ("{{ 1 / 0 }}", {}, "division"),
        ("x", {"continue_final_message": True}, "excludes add_generation_prompt"),
        ("x", {"continue_final_message": True, "add_generation_prompt": False}, "does not render the last message"),
        ("x", {"messages": []}, "messages is not a variable"),
        (None, {}, "has no chat template"),
    ],
)
def test_bad_chats_say_what_is_wrong(tmp_path: Path, template: str | None, arguments: dict[str, Any], message: str) -> None:
    tokenizer = Tokenizer.load(write_model(tmp_path, {"chat_template": template} if template else {}))
    with pytest.raises(ChatTemplateError, match=message):
        tokenizer.render_chat(CHATS[0], **arguments)


def test_an_empty_conversation_is_refused(ours: Tokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="at least one message"):
        ours.render_chat([])


def test_where_templates_are_found(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "default"}, {"name": "tool_use", "template": "tools"}]
    write_model(tmp_path, {"chat_template": named})
    assert Tokenizer.load(tmp_path).render_chat(CHATS[0]) == "default"
    assert Tokenizer.load(tmp_path).render_chat(CHATS[0], tools=[{"name": "f"}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert Tokenizer.load(tmp_path).render_chat(CHATS[0]) == "jinja"
    write_model(tmp_path, {}, chat_template={"chat_template": "json"})
    (tmp_path / "chat_template.jinja").unlink()
    assert Tokenizer.load(tmp_path).render_chat(CHATS[0]) == "json"


def test_strftime_now_is_now(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_model(tmp_path, {"chat_template": "{{ strftime_now('%Y-%m-%d') }}"}))
    assert datetime.strptime(tokenizer.render_chat(CHATS[0]), "%Y-%m-%d").year >= 2025


def test_special_tokens_and_truncation(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_model(tmp_path, {}))
    assert tokenizer.encode("abcdefgh")[0] == tokenizer.bos_token_id
    assert len(tokenizer.encode("abcdefgh")) == 9, "the file's truncation is for training, not for us"
    assert tokenizer.bos_token_id not in tokenizer.encode("abc", add_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode("abc"), skip_special_tokens=False) == "<s>abc"
    assert tokenizer.vocab_size == 258
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == tokenizer.token_text(tokenizer.vocab_size + 5) == ""


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({}, [257]),
        ({"config": {"eos_token_id": 7}}, [7]),
        ({"config": {"text_config": {"eos_token_id": [7, 8]}}}, [7, 8]),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [1, 0]}}, [1, 0]),
        ({"generation_config": {"eos_token_id": 0}}, [0]),
    ],
)
def test_eos_ids(tmp_path: Path, files: dict[str, Any], eos: list[int]) -> None:
    assert Tokenizer.load(write_model(tmp_path, {}, **files)).eos_token_ids == eos


@pytest.mark.parametrize(
    ("generation_config", "defaults"),
    [
        ({}, SamplingDefaults(1.0, 0, 1.0, 0.0)),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, SamplingDefaults(0.6, 0, 0.9, 0.0)),
        ({"temperature": 0, "top_k": 20, "min_p": 0.05}, SamplingDefaults(0.0, 20, 1.0, 0.05)),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, SamplingDefaults()),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.2}, SamplingDefaults(repetition_penalty=1.2)),
        ({"repetition_penalty": 1.05, "top_k": 20}, SamplingDefaults(1.0, 20, 1.0, 0.0, 1.05)),
        ({"top_k": -1, "top_p": None}, SamplingDefaults()),
    ],
)
def test_sampling_defaults(tmp_path: Path, generation_config: dict[str, Any], defaults: SamplingDefaults) -> None:
    assert Tokenizer.load(write_model(tmp_path, {}, generation_config=generation_config)).sampling_defaults == defaults


def test_bad_directories_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path)
    write_model(tmp_path, {})
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"generation_config\.json"):
        Tokenizer.load(tmp_path)
    write_model(tmp_path, {}, generation_config={"temperature": "warm"})
    with pytest.raises(TokenizerError, match="temperature must be a number"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("modules", "banned"),
    [
        ("inference_service.text.assembler, inference_service.text.tokenizer", "torch transformers"),
        ("inference_service.telemetry.tracing, inference_service.telemetry.summary", "torch transformers tokenizers grpc"),
        ("inference_service.client", "torch transformers tokenizers"),
    ],
)
def test_imports_stay_light(modules: str, banned: str) -> None:
    code = f"import sys, {modules}; found = set({banned.split()!r}) & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True)
