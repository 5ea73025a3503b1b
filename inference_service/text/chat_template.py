"""Renders conversations with a model's own Jinja template, as Hugging Face's `apply_chat_template` does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = Mapping[str, Any]

RESERVED_VARIABLES = frozenset({"messages", "add_generation_prompt", "continue_final_message"})
"""What callers cannot set as a further variable of a template."""

_CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_HERE "
"""Marks where the final message ends. The space at its end is lost where the template strips messages, which tells."""


class ChatTemplateError(ValueError):
    """The conversation cannot be rendered; where the template refused it, the message is the template's own."""


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str) -> None:
        self.source = source

    @cached_property
    def _template(self) -> Template:
        # At first use: a template that does not compile must not keep plain text from being served.
        try:
            return _environment().from_string(self.source)
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template does not compile: {error}") from None

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool, continue_final_message: bool, variables: Mapping[str, Any]
    ) -> str:
        """The conversation as text. With `continue_final_message` the text ends where the last message's content does.

        Raises ChatTemplateError.
        """
        if not messages:
            raise ChatTemplateError("a conversation needs at least one message")
        if reserved := RESERVED_VARIABLES & variables.keys():
            raise ChatTemplateError(f"{min(reserved)} is not a variable that can be set")
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message excludes add_generation_prompt")
        turns = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if not continue_final_message:
            return self._render(turns, add_generation_prompt, variables)
        final = turns[-1].get("content")
        if not isinstance(final, str):
            raise ChatTemplateError("continue_final_message needs a last message with text to continue")
        turns[-1]["content"] = final + _CONTINUE_HERE
        return _cut_at_mark(self._render(turns, False, variables), final)

    def _render(self, turns: list[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        defaults = {"tools": None, "documents": None}
        try:
            return self._template.render({**defaults, **variables, "messages": turns, "add_generation_prompt": add_generation_prompt})
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is a program: it can raise anything
            raise ChatTemplateError(str(error) or type(error).__name__) from error


def load_chat_template(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """A model's templates by name: "default", and what else it brings (such as "tool_use"). Empty: it has none."""
    named = tokenizer_config.get("chat_template")
    sources: dict[str, str] = {}
    if isinstance(named, str):
        sources["default"] = named
    elif isinstance(named, list):
        sources = {entry["name"]: entry["template"] for entry in named}
    as_json, as_jinja = model_dir / "chat_template.json", model_dir / "chat_template.jinja"
    if not sources and as_json.is_file():
        sources["default"] = json.loads(as_json.read_text(encoding="utf-8"))["chat_template"]
    if as_jinja.is_file():
        sources["default"] = as_jinja.read_text(encoding="utf-8")
    return {name: ChatTemplate(source) for name, source in sources.items()}


def _cut_at_mark(rendered: str, final: str) -> str:
    mark = _CONTINUE_HERE.strip()
    at = rendered.rfind(mark)
    if at < 0 or final.strip() not in rendered:
        raise ChatTemplateError("continue_final_message: the chat template does not render the last message as it is")
    # A mark that lost its space stands in a message that the template strips.
    return rendered[:at] if rendered.startswith(_CONTINUE_HERE, at) else rendered[:at].rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
    }
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; for us it is only a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 (an instance variable to Jinja)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_transparent"), [], [], body).set_lineno(line)

    def _transparent(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """Refuses names with a leading underscore, by which a template could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No parameter is called `self`: a template may have an attribute of that name. Attributes of the object are the template's alone.
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace's attribute cannot be called {name!r}")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own, escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
