"""Hugging Face's text-generation-inference. Flags as in its `docs/source/reference/launcher.md` (3.3, the last); not run here.

It has no field that makes an answer's length exact, so its cells stand only where the model does not end answers early.
"""

from __future__ import annotations

from baselines.endpoints.peer import Launch, Peer, Site, dtype_of, flags, forced_both, note_dummy, note_other_kernels

_TITLE = "TGI"
_ATTENTION = {"fa2": "flashinfer", "fa3": "flashdecoding"}


def _launch(site: Site) -> Launch:
    config, notes = site.config, list[str]()
    attention = forced_both(config, _ATTENTION, notes, _TITLE)
    note_other_kernels(config, {"attention_decode", "attention_prefill"}, notes, _TITLE)
    note_dummy(config, notes, _TITLE)
    context = config.model.max_context
    command = [site.program or "text-generation-launcher"]
    command += flags(
        model_id=site.model,
        hostname=site.host,
        port=site.port,
        dtype=dtype_of(site, {"float16", "bfloat16"}, notes, _TITLE),
        max_concurrent_requests=config.batch.max_requests + config.server.max_queue,
        max_batch_size=config.batch.max_requests,
        max_input_tokens=context - 1 if context else None,
        max_total_tokens=context or None,
        cuda_memory_fraction=config.cache.gpu_memory_fraction,
        otlp_endpoint=f"http://{site.traces}" if site.traces else "",
    )
    env = {"PREFIX_CACHING": str(int(config.cache.prefix))}
    if attention:
        env["ATTENTION"] = attention
    return Launch(command, env, notes)


PEER = Peer(
    title=_TITLE,
    install="the container ghcr.io/huggingface/text-generation-inference, which has text-generation-launcher",
    launch=_launch,
    executable="text-generation-launcher",
    metrics="/metrics",
)
