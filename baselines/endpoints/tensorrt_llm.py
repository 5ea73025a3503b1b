"""TensorRT-LLM, by its PyTorch backend. Flags as in `tensorrt_llm/commands/serve.py` of 1.2, and its documentation of the LLM API;
not run here.

It is the build that its package has: no engine is compiled, nothing is tuned.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from baselines.endpoints.peer import Launch, Peer, Site, forced_both, note_other_kernels

_TITLE = "TensorRT-LLM"
ORIENTATION = "a default build of TensorRT-LLM: its figures are an orientation, not what it can reach"
_ATTENTION = {"xqa": "TRTLLM", "fmha_v2": "TRTLLM", "trtllm-gen": "TRTLLM", "fa2": "FLASHINFER", "torch": "VANILLA"}


def _launch(site: Site) -> Launch:
    config, notes = site.config, [ORIENTATION]
    attention = forced_both(config, _ATTENTION, notes, _TITLE)
    note_other_kernels(config, {"attention_decode", "attention_prefill"}, notes, _TITLE)
    notes.append("cache.gpu_memory_fraction: TensorRT-LLM takes that share of what its weights leave free, not of all memory")
    # Its flags are written with underscores.
    command = [site.python, "-m", "tensorrt_llm.commands.serve", "serve", site.model, "--backend", "pytorch"]
    command += ["--host", site.host, "--port", str(site.port)]
    command += ["--max_batch_size", str(config.batch.max_requests)]
    if config.model.max_context:
        command += ["--max_seq_len", str(config.model.max_context)]
    command += ["--kv_cache_free_gpu_memory_fraction", f"{config.cache.gpu_memory_fraction:g}"]
    if site.traces:
        command += ["--otlp_traces_endpoint", f"http://{site.traces}"]
    return Launch([*command, "--extra_llm_api_options", str(_options(site, attention))], notes=notes)


def _options(site: Site, attention: str) -> Path:
    """The file of what has no flag. It replaces what the flags say of the same section, so the cache's share stands here again."""
    config = site.config
    cache = {"enable_block_reuse": config.cache.prefix, "free_gpu_memory_fraction": config.cache.gpu_memory_fraction}
    options: dict[str, object] = {"dtype": site.dtype, "kv_cache_config": cache}
    if config.model.load_format == "dummy":
        options["load_format"] = "dummy"
    if attention:
        options["attn_backend"] = attention
    if site.traces:
        options["return_perf_metrics"] = True  # its spans are made of these
    file = site.directory / f"{site.name}.options.yaml"
    file.write_text(yaml.safe_dump(options, sort_keys=False))
    return file


PEER = Peer(title=_TITLE, install="pip install tensorrt-llm", launch=_launch, package="tensorrt-llm", metrics="/metrics")
