"""A gRPC server of our API that stamps what it receives and sends at its socket: the reference of `loadgen_accuracy`.

A server on gRPC's own stack learns of a request half a millisecond or more after it has come, and sends as much later than it thinks;
that would be taken for the load generator's error. So this one speaks HTTP/2 itself. Each request waits as the options say. It prints
`ready on HOST:PORT`; a SIGTERM makes it print, as one JSON object, when it received and sent what, and exit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import struct
import time
from typing import Any, cast

from google.protobuf.message import Message
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset

from inference.v1 import generate_pb2, info_pb2

_HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
_TRAILERS = [("grpc-status", "0")]
_MODEL = info_pb2.GetModelInfoResponse(name="stub", vocab_size=1000, max_context=4096, eos_token_ids=[7])


class Connection(asyncio.Protocol):
    """One client's. `seen` is the server's list of the requests that have come: their trace context and when what was sent."""

    def __init__(self, options: argparse.Namespace, seen: list[dict[str, Any]]) -> None:
        self._options = options
        self._seen = seen
        self._http = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self._requests: dict[int, tuple[dict[str, str], bytearray]] = {}
        self._answers: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._http.initiate_connection()
        self._flush()

    def data_received(self, data: bytes) -> None:
        received_s = time.monotonic()
        for event in self._http.receive_data(data):
            match event:
                case RequestReceived():
                    self._requests[event.stream_id] = (dict(cast(Any, event.headers)), bytearray())
                case DataReceived():
                    self._requests[event.stream_id][1].extend(event.data)
                    self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                case StreamEnded():
                    headers, body = self._requests.pop(event.stream_id)
                    self._answers[event.stream_id] = asyncio.create_task(
                        self._answer(event.stream_id, headers, bytes(body[5:]), received_s)
                    )
                case StreamReset():
                    self._answers[event.stream_id].cancel()
        self._flush()

    async def _answer(self, stream: int, headers: dict[str, str], body: bytes, received_s: float) -> None:
        self._http.send_headers(stream, _HEADERS)
        if headers[":path"].endswith("/GetModelInfo"):
            self._send(stream, _MODEL, last=True)
        else:
            sent_s: list[float] = []
            self._seen.append({"traceparent": headers["traceparent"], "sent_s": sent_s})
            await self._generate(stream, generate_pb2.GenerateRequest.FromString(body), len(self._seen), received_s, sent_s)

    async def _generate(
        self, stream: int, request: generate_pb2.GenerateRequest, number: int, received_s: float, sent_s: list[float]
    ) -> None:
        """Notes in `sent_s` when each message with tokens was sent, and the last message, from the request's receipt on."""
        options, count = self._options, len(request.token_ids.ids)
        self._send(stream, generate_pb2.GenerateResponse(accepted=generate_pb2.Accepted(request_id=str(number), prompt_tokens=count)))
        wait_s = _first_token_s(options, number)
        for _ in range(request.stopping.max_tokens):
            await asyncio.sleep(wait_s)
            wait_s = options.gap_s
            sent_s.append(self._send(stream, generate_pb2.GenerateResponse(delta=generate_pb2.Delta(token_ids=[1], text="a"))) - received_s)
        usage = generate_pb2.Usage(prompt_tokens=count, completion_tokens=request.stopping.max_tokens)
        finished = generate_pb2.Finished(reason=generate_pb2.FINISH_REASON_LENGTH, usage=usage)
        sent_s.append(self._send(stream, generate_pb2.GenerateResponse(finished=finished), last=True) - received_s)

    def _send(self, stream: int, message: Message, last: bool = False) -> float:
        """When it was sent; the last one with the stream's end."""
        encoded = message.SerializeToString()
        self._http.send_data(stream, struct.pack(">BI", 0, len(encoded)) + encoded)
        if last:
            self._http.send_headers(stream, _TRAILERS, end_stream=True)
        return self._flush()

    def _flush(self) -> float:
        data, now_s = self._http.data_to_send(), time.monotonic()
        self._transport.write(data)
        return now_s


def _first_token_s(options: argparse.Namespace, number: int) -> float:
    """How long request `number`, which comes now, waits for its first token."""
    stall_left_s: float = options.stall_s - time.monotonic() % options.stall_every_s if options.stall_s else 0.0
    # Multiples of the golden ratio deal the spread out evenly, and no two requests come to stand alike among the others.
    usual_s: float = options.first_token_s + options.spread_s * (number * 0.6180339887 % 1)
    return max(0.0, stall_left_s) + usual_s


async def serve(options: argparse.Namespace) -> None:
    loop, stop, seen = asyncio.get_running_loop(), asyncio.Event(), list[dict[str, Any]]()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    server = await loop.create_server(lambda: Connection(options, seen), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    print(f"ready on {host}:{port}", flush=True)
    await stop.wait()
    print(json.dumps({"requests": seen}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-token-s", type=float, default=0.0)
    parser.add_argument("--spread-s", type=float, default=0.0, help="first tokens take up to so much longer")
    parser.add_argument("--stall-s", type=float, default=0.0, help="no first token comes in so long of each --stall-every-s")
    parser.add_argument("--stall-every-s", type=float, default=2.0)
    parser.add_argument("--gap-s", type=float, default=0.0)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
