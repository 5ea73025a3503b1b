"""Ours. Its traces go to a file of its own, since that is what it does without a receiver."""

from __future__ import annotations

from baselines.endpoints.peer import Launch, Peer, Site, flags


def _launch(site: Site) -> Launch:
    settings = {"server.host": site.host, "server.port": site.port, "telemetry.traces": str(bool(site.traces)).lower()}
    if site.traces:
        settings |= {"telemetry.otlp_endpoint": '""', "telemetry.trace_file": site.directory / f"{site.name}.traces.jsonl"}
    command = [site.python, "-m", "inference_service.cli", "serve", *flags(config=site.file)]
    return Launch(command + [f"--set={key}={value}" for key, value in settings.items()], notes=[])


PEER = Peer(title="ours", install="pip install -e .", launch=_launch, package="inference-service")
