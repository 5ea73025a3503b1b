"""How much of a client's TTFT is not the server's: SmolLM2 under load, each request's client span against its server span.

    python benchmarks/ttft_gap.py

Runs the service and Locust on this machine for at least 200 requests, then joins the traces of both sides. What is left between the two
spans is the network, gRPC on both sides, and waiting for a core.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from inference_service.telemetry.spans import Request, join, read_spans
from loadgen._verdict import UNTRUSTED

REQUESTS = 200
USERS = 4
RUN_S = 120
ROOT = Path(__file__).parents[1]


def run(directory: Path) -> list[Request]:
    """Serve, load, stop; the requests with a first token on both sides."""
    server_traces, client_traces = directory / "server.jsonl", directory / "client.jsonl"
    settings = ("server.port=0", f"telemetry.trace_file={server_traces}", "cache.prefix=false")
    command = [sys.executable, "-m", "inference_service.cli", "serve", *(f"--set={setting}" for setting in settings)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().removeprefix("ready on ").strip()
        load = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadgen"), "--headless", "--only-summary", "-u", str(USERS)]
        load += ["-t", f"{RUN_S}s", "--stop-timeout", "30", "--target", f"grpc://{address}"]
        load += ["--set", f"loadtest.trace_file={client_traces}"]
        load += ["--set", "loadtest.workload.input_tokens=32", "--set", "loadtest.workload.output_tokens=16"]
        # Both share this machine's cores: the load generator may well say that it is not to be trusted.
        if (status := subprocess.run(load, cwd=directory).returncode) not in (0, UNTRUSTED):
            sys.exit(f"the load generator failed with status {status}")
    finally:
        server.terminate()
        server.wait()
    requests = join(read_spans([server_traces, client_traces])[0])
    return [request for request in requests if request.client and request.server and request.client.ttft_ns and request.server.ttft_ns]


def main() -> None:
    """Print the distribution of the gap."""
    with tempfile.TemporaryDirectory() as directory:
        requests = run(Path(directory))
    gaps_ms = []
    for request in requests:
        assert request.client and request.server
        gaps_ms.append(((request.client.ttft_ns or 0) - (request.server.ttft_ns or 0)) / 1e6)
    gaps_ms.sort()
    table = Table("requests", "least", "p50", "p90", "p99", title=f"client TTFT - server TTFT in ms, {USERS} users")
    at = [gaps_ms[int(share * (len(gaps_ms) - 1))] for share in (0, 0.5, 0.9, 0.99)]
    table.add_row(str(len(gaps_ms)), *(f"{gap:.2f}" for gap in at))
    Console().print(table)
    if len(gaps_ms) < REQUESTS:
        sys.exit(f"only {len(gaps_ms)} requests ended in {RUN_S} s; {REQUESTS} are wanted")


if __name__ == "__main__":
    main()
