"""The three forms of a prompt (token ids, text, messages of a chat), and how a conversation goes on from one turn to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from inference_service.loadtest import Workload
from loadgen._target import Message, Observation, Request, Takes, TargetError

Form = Literal["token_ids", "text", "messages"]
Content = list[int] | str
"""What one turn says: token ids in that form, else text."""


def choose_form(workload: Workload, takes: Takes) -> Form:
    """The settings decide, so that all targets get the same. Raises TargetError for a target that does not take what they say."""
    if workload.prompt == "text":
        if not takes.text and not takes.messages:
            raise TargetError("loadtest.workload.prompt: the target takes token ids alone; set it to token_ids")
        return "messages" if takes.messages else "text"
    if not takes.token_ids:
        raise TargetError("loadtest.workload.prompt: the target takes no token ids; set it to text")
    return "token_ids"


def settings(workload: Workload, seed: int, index: int) -> dict[str, Any]:
    """A Request's fields that are the same in every conversation, but for the seed of its draws."""
    return {
        "exact": workload.exact_output,
        "temperature": workload.temperature,
        "top_p": workload.top_p,
        "top_k": workload.top_k,
        "seed": seed if workload.seeded else None,
        "index": index,
    }


def opening(form: Form, content: Content) -> dict[str, Any]:
    """A Request's fields for a conversation's first turn."""
    if form == "messages":
        assert isinstance(content, str)
        return {"messages": (Message("user", content),)}
    return {form: content}


def following(request: Request, observation: Observation, content: Content, **changes: Any) -> Request:
    """The turn after `request`, whose prompt holds that of `request`, the answer to it, and `content`."""
    answer = "".join(observation.answer_text)
    if isinstance(content, list):
        changes["token_ids"] = [*request.token_ids, *observation.answer_ids, *content]
    elif request.messages:
        changes["messages"] = (*request.messages, Message("assistant", answer), Message("user", content))
    else:
        changes["text"] = f"{request.text}{answer} {content}"
    return replace(request, turn=request.turn + 1, **changes)


def check_conversation(form: Form, takes: Takes) -> None:
    """Raises TargetError where the answers of a conversation cannot be put into its next prompt."""
    if form == "token_ids" and not takes.answer_ids:
        raise TargetError("loadtest.workload.turns: the target does not tell its answers' token ids; set loadtest.workload.prompt to text")
