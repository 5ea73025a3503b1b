"""LMDeploy. Flags as in `lmdeploy/cli/serve.py` and `utils.py` of 0.10 and later, which serve metrics unless told not to; not run here."""

from __future__ import annotations

from baselines.endpoints.peer import Launch, Peer, Site, dtype_of, flags, note_dummy, note_other_kernels

_TITLE = "LMDeploy"


def _launch(site: Site) -> Launch:
    config, notes = site.config, list[str]()
    note_other_kernels(config, set(), notes, _TITLE)
    note_dummy(config, notes, _TITLE)
    command = [site.python, "-m", "lmdeploy", "serve", "api_server", site.model]
    command += flags(
        server_name=site.host,
        server_port=site.port,
        dtype=dtype_of(site, {"auto", "float16", "bfloat16"}, notes, _TITLE),
        max_batch_size=config.batch.max_requests,
        session_len=config.model.max_context or None,
        cache_max_entry_count=config.cache.gpu_memory_fraction,
        enable_prefix_caching=config.cache.prefix,
    )
    notes.append("cache.gpu_memory_fraction: LMDeploy takes that share of what its weights leave free, not of all memory")
    if site.traces:
        notes.append("comparison.traces: LMDeploy exports none")
    return Launch(command, notes=notes)


PEER = Peer(title=_TITLE, install="pip install lmdeploy", launch=_launch, package="lmdeploy", metrics="/metrics")
