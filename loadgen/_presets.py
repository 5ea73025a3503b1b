"""How servers of OpenAI's API differ, as far as a load test is concerned: one row each.

Sources, read and not recorded but for vLLM's and llama.cpp's, which `make test-peers` runs:
vLLM            vllm/entrypoints/openai/{completion,chat_completion}/protocol.py (0.32)
TensorRT-LLM    tensorrt_llm/serve/openai_protocol.py, which refuses fields that it does not know
SGLang          python/sglang/srt/entrypoints/openai/{protocol,serving_completions}.py
LMDeploy        lmdeploy/serve/openai/protocol.py
LoRAX           router/src/{lib,server}.rs
llama.cpp       tools/server/{README.md,server-schema.cpp,server-task.cpp} (b11434)
TGI             router/src/{lib,server,validation}.rs
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class Preset:
    """One server's dialect."""

    ignore_eos: str = "ignore_eos"
    """The field that makes an answer's length exact; "": there is none. (`min_tokens` as well would mask stop tokens at every step.)"""
    neutral: dict[str, Any] = field(default_factory=lambda: _PLAIN)
    """What turns all sampling but the temperature off. Every such field is given, so that no default of the model's changes the work; but
    for servers that refuse a neutral value."""
    token_ids: bool = True
    """It takes a prompt as token ids."""
    return_ids: str = ""
    """The field that asks for the answer's token ids; with random weights many tokens have no text, and show by their ids alone."""
    chat_ids: bool = False
    """It gives them in a chat, too."""
    running_usage: bool = False
    """stream_options.continuous_usage_stats: each chunk says how many tokens there have been."""
    include_usage: bool = True
    """It knows stream_options.include_usage. Else it sends its usage unasked."""
    keeps_connections: bool = True
    """llama.cpp's server promises to, and then closes them after each stream: whoever sends on one may find it gone."""
    info: str = ""
    """A path that tells the model in place of the API's list."""


PRESETS = {
    "vllm": Preset(return_ids="return_token_ids", chat_ids=True),
    "trtllm": Preset(running_usage=True),
    "sglang": Preset(return_ids="return_token_ids", running_usage=True, neutral={**_PLAIN, "top_k": -1}),
    "lmdeploy": Preset(return_ids="return_token_ids", chat_ids=True, token_ids=False),
    "lorax": Preset(ignore_eos="ignore_eos_token", neutral={}, token_ids=False, include_usage=False, info="/info"),
    "llamacpp": Preset(neutral={"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}, keeps_connections=False),
    "tgi": Preset(ignore_eos="", neutral={}, token_ids=False, info="/info"),
}
"""By the name that a target's URL begins with. PowerInfer's server is one of an old llama.cpp: `llamacpp`."""
