"""Every FlashInfer function that `kernels/` calls exists, and takes the arguments that it is given. FlashInfer imports without a GPU."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

pytest.importorskip("flashinfer")

CALLS = [
    (
        "decode",
        "xqa_batch_decode_with_kv_cache",
        ["query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len"],
        ["bmm1_scale", "bmm2_scale", "out", "kv_layout"],
    ),
    ("prefill", "BatchPrefillWithPagedKVCacheWrapper", ["float_workspace_buffer", "kv_layout"], ["backend"]),
    (
        "prefill",
        "BatchPrefillWithPagedKVCacheWrapper.plan",
        [
            "self",
            "qo_indptr",
            "paged_kv_indptr",
            "paged_kv_indices",
            "paged_kv_last_page_len",
            "num_qo_heads",
            "num_kv_heads",
            "head_dim_qk",
            "page_size",
        ],
        ["causal", "q_data_type", "kv_data_type", "seq_lens", "max_token_per_sequence", "sm_scale", "window_left", "logits_soft_cap"],
    ),
    ("prefill", "BatchPrefillWithPagedKVCacheWrapper.run", ["self", "q", "paged_kv_cache"], ["out"]),
    (
        "prefill",
        "trtllm_fmha_v2_prefill",
        [
            "qkv",
            "input_layout",
            "workspace_buffer",
            "seq_lens",
            "max_q_len",
            "max_kv_len",
            "bmm1_scale",
            "bmm2_scale",
            "batch_size",
            "cum_seq_lens_q",
            "cum_seq_lens_kv",
        ],
        ["block_tables", "out", "mask_mode"],
    ),
    ("norm", "rmsnorm", ["input", "weight", "eps"], []),
    ("norm", "fused_add_rmsnorm", ["input", "residual", "weight", "eps"], []),
    ("norm", "gemma_rmsnorm", ["input", "weight", "eps"], []),
    ("norm", "gemma_fused_add_rmsnorm", ["input", "residual", "weight", "eps"], []),
    ("activation", "silu_and_mul", ["input"], []),
    ("activation", "gelu_tanh_and_mul", ["input"], []),
]


@pytest.mark.parametrize(("module", "name", "positional", "keywords"), CALLS, ids=[f"{call[0]}.{call[1]}" for call in CALLS])
def test_the_arguments_that_are_given_fit(module: str, name: str, positional: list[str], keywords: list[str]) -> None:
    function: Any = importlib.import_module(f"flashinfer.{module}")
    for part in name.split("."):
        function = getattr(function, part)
    parameters = inspect.signature(function).parameters
    assert list(parameters)[: len(positional)] == positional
    assert set(keywords) <= set(parameters)
    demanded = {key for key, parameter in parameters.items() if parameter.default is parameter.empty and parameter.kind.name[:3] != "VAR"}
    assert demanded <= {*positional, *keywords}
