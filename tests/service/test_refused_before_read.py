"""Calls that are refused before their request is read are told of all the same: by a metric and a span, and only those of Generate."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from inference_service.rpc.lifecycle import API
from tests.service.conftest import run_server
from tests.service.test_prometheus import get, metrics_address

TOKEN = "a-token-that-is-long-enough"
PARENT = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


def test_they_are_counted_and_traced(tmp_path: Path) -> None:
    (tmp_path / "tokens.yaml").write_text(f"[{{name: alice, token: {TOKEN}}}]")
    settings = (f"security.tokens_file={tmp_path}/tokens.yaml", "telemetry.metrics_port=0")
    with run_server(tmp_path, "model.load_format=echo", *settings) as server, server.channel() as channel:

        def code(method: str, token: str | None, body: bytes = b"") -> str:
            metadata = [PARENT, *([("authorization", f"Bearer {token}")] if token else [])]
            start: Any = channel.unary_stream(f"/{API}/{method}")
            call = start(body, metadata=metadata, timeout=30)
            with pytest.raises(grpc.RpcError):
                list(call)
            return str(call.code().name)

        assert code("Generate", None) == code("Generate", "another-" + TOKEN) == code("GetLoad", None) == "UNAUTHENTICATED"
        assert code("Generate", TOKEN, b"\xff") == code("Tokenize", TOKEN, b"\xff") == "INVALID_ARGUMENT"
        told = get(f"http://{metrics_address(server)}/metrics")
        assert server.stop() == 0
    refusals = dict(re.findall(r'^inference_refusals_total{reason="(\w+)"} (\S+)$', told, re.MULTILINE))
    assert refusals == {"QUEUE_FULL": "0.0", "MISSING_TOKEN": "1.0", "UNKNOWN_TOKEN": "1.0", "MALFORMED_REQUEST": "1.0"}
    assert 'inference_requests_total{rpc_response_status_code="UNAUTHENTICATED"} 2.0' in told
    spans = [json.loads(line) for line in server.traces.read_text().splitlines()]
    refused = [span for span in spans if span["trace_id"] == PARENT[1].split("-")[1]]
    assert [(span["kind"], span["status"], span["status_message"], span["parent_id"]) for span in refused] == [
        ("SERVER", "ERROR", reason, PARENT[1].split("-")[2]) for reason in ("MISSING_TOKEN", "UNKNOWN_TOKEN", "MALFORMED_REQUEST")
    ]
    assert TOKEN not in server.traces.read_text()
