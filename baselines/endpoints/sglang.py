"""SGLang. Flags as in its documentation of server arguments, attention backends and tracing, which is that of 0.5; not run here."""

from __future__ import annotations

from baselines.endpoints.peer import Launch, Peer, Site, flags, forced, note_other_kernels

_TITLE = "SGLang"
_ATTENTION = {"fa2": "flashinfer", "fa3": "fa3", "triton": "triton", "torch": "torch_native", "trtllm-gen": "trtllm_mha"}


def _launch(site: Site) -> Launch:
    config, notes = site.config, list[str]()
    decode = forced(config, "attention_decode", _ATTENTION, notes, _TITLE)
    prefill = forced(config, "attention_prefill", _ATTENTION, notes, _TITLE)
    note_other_kernels(config, {"attention_decode", "attention_prefill"}, notes, _TITLE)
    command = [site.python, "-m", "sglang.launch_server"]
    command += flags(
        model_path=site.model,
        host=site.host,
        port=site.port,
        dtype=site.dtype,
        device="cpu" if site.on_cpu else "",
        max_running_requests=config.batch.max_requests,
        context_length=config.model.max_context or None,
        mem_fraction_static=None if site.on_cpu else config.cache.gpu_memory_fraction,
        load_format="dummy" if config.model.load_format == "dummy" else "",
        disable_radix_cache=not config.cache.prefix,
        decode_attention_backend=decode,
        prefill_attention_backend=prefill,
        enable_metrics=True,
        enable_trace=bool(site.traces),
        otlp_traces_endpoint=site.traces,
    )
    return Launch(command, notes=notes)


PEER = Peer(title=_TITLE, install='pip install "sglang[all]"', launch=_launch, package="sglang", metrics="/metrics")
