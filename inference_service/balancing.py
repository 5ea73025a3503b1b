"""How clients spread their calls over all addresses that a server's name resolves to: in turn, and again elsewhere where one is refused.

gRPC by itself stays with the first address. In Kubernetes a headless Service's name resolves to all ready pods: docs/operations.md.
"""

from __future__ import annotations

import json
from typing import Any

ROUND_ROBIN: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
RETRIES: dict[str, Any] = {
    "methodConfig": [
        {
            "name": [{"service": "inference.v1.InferenceService"}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.05s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
"""A call is repeated only as long as nothing of its answer has come."""


def spread(retries: bool = True) -> tuple[str, str]:
    """The channel's option. Without retries a failure is seen at once."""
    return "grpc.service_config", json.dumps(ROUND_ROBIN | (RETRIES if retries else {}))
