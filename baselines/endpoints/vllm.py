"""vLLM. Flags as in 0.25.1 and 0.32.0, from their `vllm/engine/arg_utils.py`; both were run."""

from __future__ import annotations

import math

from baselines.endpoints.peer import Launch, Peer, Site, flags, forced_both, note_other_kernels

_TITLE = "vLLM"
_ATTENTION = {"fa2": "FLASHINFER", "fa3": "FLASH_ATTN", "triton": "TRITON_ATTN", "trtllm-gen": "FLASHINFER"}
"""Our fa2 is FlashInfer's kernel; vLLM's FLASH_ATTN is FlashAttention 3 on sm_90, and 2 elsewhere."""


def _launch(site: Site) -> Launch:
    config, notes = site.config, list[str]()
    attention = forced_both(config, _ATTENTION, notes, _TITLE)
    note_other_kernels(config, {"attention_decode", "attention_prefill"}, notes, _TITLE)
    command = [site.python, "-m", "vllm.entrypoints.cli.main", "serve", site.model]
    command += flags(
        host=site.host,
        port=site.port,
        dtype=site.dtype,
        max_num_seqs=config.batch.max_requests,
        max_model_len=config.model.max_context or None,
        gpu_memory_utilization=None if site.on_cpu else config.cache.gpu_memory_fraction,
        load_format="dummy" if config.model.load_format == "dummy" else "",
        no_enable_prefix_caching=not config.cache.prefix,
        attention_backend=attention,
        otlp_traces_endpoint=f"grpc://{site.traces}" if site.traces else "",
    )
    env = {}
    if site.on_cpu:
        # By itself it leaves a core to its front end, which ours and others share with theirs.
        env = {
            "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(config.cache.memory_gib)),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, site.cores)),
        }
    if site.traces:
        env["OTEL_EXPORTER_OTLP_TRACES_INSECURE"] = "true"
    return Launch(command, env, notes)


PEER = Peer(
    title=_TITLE,
    install="pip install vllm; on a CPU baselines/peers/vllm_cpu.sh DIR, and program: DIR/bin/python",
    launch=_launch,
    package="vllm",
    metrics="/metrics",
)
