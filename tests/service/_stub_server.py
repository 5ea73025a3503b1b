"""A gRPC server of our API with scripted delays and errors: the load generator's peer in tests, run as a process of its own.

It prints `ready on HOST:PORT`. A SIGTERM makes it print, as one JSON object, what it has seen, and exit.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from inference.v1 import generate_pb2, inference_pb2_grpc, info_pb2

VOCAB_SIZE = 1000
EOS = 7


class StubServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Answers each prompt with as many tokens as it asks for; every `fail_every`th request fails instead, with one code after the other."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.running = 0
        self.peak = 0

    def Generate(self, request: generate_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[generate_pb2.GenerateResponse]:
        began = time.monotonic()
        sent_s: list[float] = []
        seen = {
            "token_ids": list(request.token_ids.ids),
            "max_tokens": request.stopping.max_tokens,
            "ignore_eos": request.stopping.ignore_eos,
            "traceparent": dict(context.invocation_metadata()).get("traceparent", ""),
            "deadline_s": context.time_remaining(),
            "outcome": "cut off",
            "sent_s": sent_s,
        }
        with self.lock:
            self.requests.append(seen)
            number = len(self.requests)
            self.running += 1
            self.peak = max(self.peak, self.running)
        try:
            if self.options.fail_every and number % self.options.fail_every == 0:
                codes: list[str] = self.options.fail_with
                seen["outcome"] = code = codes[number // self.options.fail_every % len(codes)]
                context.abort(grpc.StatusCode[code], "as scripted")
            yield from self._answer(request, number, began, sent_s)
            seen["outcome"] = "finished"
        finally:
            with self.lock:
                self.running -= 1

    def _first_token_s(self, number: int) -> float:
        """How long a request that comes now waits for its first token."""
        options = self.options
        stall_left_s: float = options.stall_s - time.monotonic() % options.stall_every_s if options.stall_s else 0.0
        # A multiplier that is prime to 100 deals the spread out evenly.
        usual_s: float = options.first_token_s + options.spread_s * (number * 37 % 100) / 100
        return max(0.0, stall_left_s) + usual_s

    def _answer(
        self, request: generate_pb2.GenerateRequest, number: int, began: float, sent_s: list[float]
    ) -> Iterator[generate_pb2.GenerateResponse]:
        """Notes in `sent_s` when it sent each message with tokens, and the last message, from `began` on."""
        options = self.options
        first_token_s = self._first_token_s(number)
        accepted = generate_pb2.Accepted(request_id=str(number), prompt_tokens=len(request.token_ids.ids))
        yield generate_pb2.GenerateResponse(accepted=accepted)
        # A delta without tokens must not count as the first one.
        yield generate_pb2.GenerateResponse(delta=generate_pb2.Delta())
        sent = 0
        while sent < request.stopping.max_tokens:
            time.sleep(options.gap_s if sent else first_token_s)
            sent_s.append(time.monotonic() - began)
            count = min(options.tokens_per_delta, request.stopping.max_tokens - sent)
            yield generate_pb2.GenerateResponse(delta=generate_pb2.Delta(token_ids=[1] * count, text="a" * count))
            sent += count
        if options.no_finish:
            return
        usage = generate_pb2.Usage(prompt_tokens=len(request.token_ids.ids), completion_tokens=sent + options.usage_error)
        sent_s.append(time.monotonic() - began)
        finished = generate_pb2.Finished(reason=generate_pb2.FINISH_REASON_LENGTH, usage=usage)
        yield generate_pb2.GenerateResponse(finished=finished)

    def GetModelInfo(self, request: info_pb2.GetModelInfoRequest, context: grpc.ServicerContext) -> info_pb2.GetModelInfoResponse:
        return info_pb2.GetModelInfoResponse(name="stub", vocab_size=VOCAB_SIZE, max_context=4096, eos_token_ids=[EOS])

    def report(self) -> str:
        return json.dumps({"peak": self.peak, "requests": self.requests})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first-token-s", type=float, default=0.0)
    parser.add_argument("--spread-s", type=float, default=0.0, help="first tokens take up to so much longer")
    parser.add_argument("--stall-s", type=float, default=0.0, help="no first token comes in so long of each --stall-every-s")
    parser.add_argument("--stall-every-s", type=float, default=2.0)
    parser.add_argument("--gap-s", type=float, default=0.0)
    parser.add_argument("--tokens-per-delta", type=int, default=1)
    parser.add_argument("--slots", type=int, default=32, help="requests answered at once; more wait")
    parser.add_argument("--fail-every", type=int, default=0)
    parser.add_argument("--fail-with", nargs="+", default=["RESOURCE_EXHAUSTED"])
    parser.add_argument("--no-finish", action="store_true")
    parser.add_argument("--usage-error", type=int, default=0)
    options = parser.parse_args()

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    servicer = StubServicer(options)
    server = grpc.server(ThreadPoolExecutor(options.slots))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"ready on 127.0.0.1:{port}", flush=True)
    stop.wait()
    server.stop(grace=0).wait()
    print(servicer.report(), flush=True)


if __name__ == "__main__":
    main()
