"""LoRAX. Flags as in its `docs/reference/launcher.md` (0.12, the last); not run here."""

from __future__ import annotations

from baselines.endpoints.peer import Launch, Peer, Site, dtype_of, flags, note_dummy, note_other_kernels

_TITLE = "LoRAX"


def _launch(site: Site) -> Launch:
    config, notes = site.config, list[str]()
    note_other_kernels(config, set(), notes, _TITLE)
    note_dummy(config, notes, _TITLE)
    context = config.model.max_context
    dtype = dtype_of(site, {"float16", "bfloat16"}, notes, _TITLE)
    command = [site.program or "lorax-launcher"]
    command += flags(
        model_id=site.model,
        hostname=site.host,
        port=site.port,
        dtype=dtype,
        max_concurrent_requests=config.batch.max_requests + config.server.max_queue,
        max_input_length=context - 1 if context else None,
        max_total_tokens=context or None,
        cuda_memory_fraction=config.cache.gpu_memory_fraction,
        otlp_endpoint=f"http://{site.traces}" if site.traces else "",
    )
    notes.append("batch.max_requests: LoRAX limits a batch by its tokens alone")
    if config.cache.prefix:
        notes.append("cache.prefix has no equivalent in LoRAX")
    return Launch(command, notes=notes)


PEER = Peer(
    title=_TITLE,
    install="the container ghcr.io/predibase/lorax, which has lorax-launcher",
    launch=_launch,
    executable="lorax-launcher",
    metrics="/metrics",
)
