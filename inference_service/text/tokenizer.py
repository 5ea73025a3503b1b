"""A model's tokenizer: ids of text and of conversations, and what its directory says about ends and sampling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from inference_service.text.added_tokens import add_tokens, tokens_by_role
from inference_service.text.chat_template import ChatTemplate, ChatTemplateError, Message, load_chat_template
from inference_service.text.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer, byte_table
from inference_service.text.tokenizer_files import TokenizerError, tokenizer_directory

__all__ = ["SamplingDefaults", "Tokenizer", "TokenizerError"]


@dataclass(frozen=True)
class SamplingDefaults:
    """What absent sampling fields mean: the model's generation_config.json, else plain sampling from the whole distribution."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Tokenizer:
    """The tokenizer of a Hugging Face model directory."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        chat_templates: Mapping[str, ChatTemplate],
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int] = (),
        sampling_defaults: SamplingDefaults | None = None,
    ) -> None:
        """`special_tokens` are the tokens by role, as templates name them ("bos_token")."""
        self.library = library
        """The tokenizer proper."""
        self._chat_templates = chat_templates
        self._special_tokens = special_tokens
        self.eos_token_ids = list(eos_token_ids)
        self.sampling_defaults = sampling_defaults or SamplingDefaults()
        self.bos_token_id = library.token_to_id(special_tokens.get("bos_token", ""))
        self.vocab_size = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """Ids that text can have are less than this; the model's own vocabulary may be larger."""

    @classmethod
    def load(cls, model_dir: str | Path) -> Tokenizer:
        """Read tokenizer.json (made first where there are other tokenizer files) and, where they exist, tokenizer_config.json,
        special_tokens_map.json, added_tokens.json, chat_template.*, generation_config.json and config.json.

        Raises TokenizerError.
        """
        model_dir = Path(model_dir)
        directory = tokenizer_directory(model_dir)
        path = directory / "tokenizer.json"
        try:
            library = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizerError(f"{path}: {error}") from None
        library.no_truncation()
        library.no_padding()
        tokenizer_config = _read_json(model_dir / "tokenizer_config.json")
        # What a conversion leaves in its special_tokens_map.json is all that counts, its class's own tokens too.
        special_tokens_map = _read_json(directory / "special_tokens_map.json")
        special_tokens = tokens_by_role(tokenizer_config, special_tokens_map)
        if directory == model_dir:
            try:
                added_tokens = _read_json(model_dir / "added_tokens.json")
                add_tokens(library, special_tokens, tokenizer_config, special_tokens_map, added_tokens)
            except (TypeError, ValueError, AttributeError) as error:
                raise TokenizerError(f"{model_dir / 'tokenizer_config.json'}: the tokens that it adds cannot be read: {error}") from None
        generation_config, config = _read_json(model_dir / "generation_config.json"), _read_json(model_dir / "config.json")
        try:
            chat_templates = load_chat_template(model_dir, tokenizer_config)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TokenizerError(f"{model_dir}: the chat template cannot be read: {error!r}") from None
        eos_token_ids = _eos_token_ids(generation_config, config, library.token_to_id(special_tokens.get("eos_token", "")))
        return cls(library, chat_templates, special_tokens, eos_token_ids, _sampling_defaults(generation_config))

    @property
    def has_chat_template(self) -> bool:
        return "default" in self._chat_templates

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, by default with what the tokenizer puts around it (such as a beginning-of-sequence token)."""
        # The batch form lets other threads run meanwhile; the plain one holds the interpreter, for seconds over megabytes.
        (encoding,) = self.library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_word(self, word: str) -> list[list[int]]:
        """The ids of a word with a space before it and without: how it is written within a text and at the beginning of one."""
        word = word.removeprefix(" ")
        return [ids for text in (word, f" {word}") if (ids := self.encode(text, add_special_tokens=False))]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Ids that the tokenizer does not know have none."""
        text: str = self.library.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """One token alone as text, special or not; U+FFFD stands for bytes that are no whole character."""
        if self._byte_table is None:
            return self.decode([token_id], skip_special_tokens=False)
        return self._byte_table[token_id].decode("utf-8", "replace") if token_id < len(self._byte_table) else ""

    def render_chat(
        self,
        messages: Sequence[Message],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """A conversation as the model's chat template writes it; `variables` are further ones that the template knows.

        Raises ChatTemplateError, also where the model has no template.
        """
        name = "tool_use" if variables.get("tools") and "tool_use" in self._chat_templates else "default"
        template = self._chat_templates.get(name)
        if template is None:
            raise ChatTemplateError("the model has no chat template")
        return template.render(messages, add_generation_prompt, continue_final_message, {**self._special_tokens, **variables})

    def encode_chat(
        self,
        messages: Sequence[Message],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """The ids of `render_chat`'s text. No special tokens are added: the template writes its own."""
        text = self.render_chat(messages, add_generation_prompt, continue_final_message, **variables)
        return self.encode(text, add_special_tokens=False)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A new incremental detokenizer, for one sequence."""
        table = self._visible_byte_table if skip_special_tokens else self._byte_table
        if table is not None:
            return ByteLevelDetokenizer(table)
        return WindowDetokenizer(self.library, self.special_ids if skip_special_tokens else frozenset())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The tokens that `skip_special_tokens` leaves out."""
        return frozenset(token_id for token_id, token in self.library.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _byte_table(self) -> list[bytes] | None:
        return byte_table(self.library)

    @cached_property
    def _visible_byte_table(self) -> list[bytes] | None:
        table = self._byte_table
        return table and [b"" if token_id in self.special_ids else token for token_id, token in enumerate(table)]


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: the file must hold a JSON object")
    return content


def _eos_token_ids(generation_config: Mapping[str, Any], config: Mapping[str, Any], tokenizer_eos: int | None) -> list[int]:
    for source in (generation_config, config, config.get("text_config") or {}, {"eos_token_id": tokenizer_eos}):
        ids = source.get("eos_token_id")
        if ids is not None:
            return list(ids) if isinstance(ids, list) else [ids]
    return []


def _sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """The values that the file gives; what it leaves out is off, whatever `transformers` would assume. With `do_sample: false`, the
    penalty alone, which counts for greedy decoding too."""

    def given(name: str, otherwise: float) -> float:
        value = generation_config.get(name)
        if value is not None and not isinstance(value, int | float):
            raise TokenizerError(f"generation_config.json: {name} must be a number, not {value!r}")
        return otherwise if value is None else value

    penalty = float(given("repetition_penalty", 1.0))
    if generation_config.get("do_sample") is False:
        return SamplingDefaults(repetition_penalty=penalty)
    return SamplingDefaults(
        temperature=float(given("temperature", 1.0)),
        top_k=max(0, int(given("top_k", 0))),
        top_p=float(given("top_p", 1.0)),
        min_p=float(given("min_p", 0.0)),
        repetition_penalty=penalty,
    )
