"""llama.cpp's server. Flags as `llama-server --help` of 0.6.0 (build 11434) has them; it was run."""

from __future__ import annotations

from gguf import GGUFReader, LlamaFileType

from baselines.endpoints.peer import Launch, Peer, Site, flags, note_other_kernels

_TITLE = "llama.cpp"
_CONTEXT = 4096
"""Tokens a slot where model.max_context does not say: the server divides one cache among its slots."""


def _launch(site: Site) -> Launch:
    """`site.model` must be a GGUF file. Raises ValueError."""
    config, notes = site.config, [_weights(site)]
    note_other_kernels(config, set(), notes, _TITLE)
    slots = config.batch.max_requests
    command = [site.program or "llama-server"]
    command += flags(
        model=site.model,
        host=site.host,
        port=site.port,
        parallel=slots,
        ctx_size=slots * (config.model.max_context or _CONTEXT),
        threads=len(site.cores) if site.on_cpu else None,
        n_gpu_layers=0 if site.on_cpu else "all",
        no_cache_prompt=not config.cache.prefix,
        metrics=True,
    )
    if not site.on_cpu:
        notes.append("cache.gpu_memory_fraction has no equivalent in llama.cpp, which takes what its context needs")
    if site.traces:
        notes.append("comparison.traces: llama.cpp exports none")
    return Launch(command, notes=notes)


def _weights(site: Site) -> str:
    """What type they are of: most GGUF files are quantized, so they are other weights than the checkpoint's."""
    try:
        field = GGUFReader(site.model).get_field("general.file_type")
    except (OSError, ValueError, IndexError) as error:
        raise ValueError(f"{site.name}: `model` must be a GGUF file for llama.cpp, not {site.model}: {error}") from None
    kind = LlamaFileType(field.contents()).name.removeprefix("MOSTLY_").removeprefix("ALL_") if field else "an unknown type"
    return f"weights of another type: {kind} from its GGUF file, where model.dtype is {site.dtype}"


PEER = Peer(
    title=_TITLE,
    install="baselines/peers/llama_cpp.sh DIR, and program: DIR/llama-server",
    launch=_launch,
    executable="llama-server",
    metrics="/metrics",
)
