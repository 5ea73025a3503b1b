"""The different experts that a server of ours touches in a layer, over its newest decode steps: a probe for `baselines.compare`.

    python -m baselines.probe_experts --target grpc://HOST:PORT --batch 32

Prints {"distinct_experts": 110.3, "experts_batch": 32}: the mean over the counted steps of the largest batch up to --batch, and that batch.
Both are null for a model without experts, and where no step of at least half of --batch was counted.
"""

from __future__ import annotations

import argparse
import json

from inference.v1 import info_pb2
from inference_service.client import Client

LEAST_SHARE = 0.5


def figures(experts: list[info_pb2.ExpertLoad], batch: int) -> dict[str, float | None]:
    """What is printed."""
    fitting = [load for load in experts if LEAST_SHARE * batch <= load.batch <= batch]
    if not fitting:
        return {"distinct_experts": None, "experts_batch": None}
    largest = max(fitting, key=lambda load: load.batch)
    return {"distinct_experts": largest.distinct_experts, "experts_batch": largest.batch}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m baselines.probe_experts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True, help="grpc://HOST:PORT")
    parser.add_argument("--batch", type=int, required=True, help="such as a cell's concurrency")
    arguments = parser.parse_args()
    with Client(arguments.target.removeprefix("grpc://")) as client:
        print(json.dumps(figures(list(client.load().experts), arguments.batch)))


if __name__ == "__main__":
    main()
