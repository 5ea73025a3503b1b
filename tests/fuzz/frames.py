"""HTTP/2 as no client should speak it: bytes for a plaintext connection of their own, and what the server makes of them."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from hpack import Decoder, Encoder, HPACKError
from hypothesis import strategies as st

from inference.v1 import generate_pb2 as pb

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 1, 4
INITIAL_WINDOW_SIZE = 4
LIMIT_S = 20.0
GOOD = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/inference.v1.InferenceService/GetLoad"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
GENERATE = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), stopping=pb.StopConditions(max_tokens=200)).SerializeToString()

NAMES = ["grpc-timeout", "grpc-encoding", "authorization", "traceparent", "content-length", "te", ":path", ":x", "a-bin", "UPPER"]
VALUES = ["", "-1", "99999999H", "1n", "0S", "gzip", "application/grpc+json", "/", "/a/b", "Bearer \x7f", "x" * 7000, "00-", "=,="]

Draw = Callable[[st.SearchStrategy[Any]], Any]


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def message(body: bytes) -> bytes:
    """As gRPC frames it: not compressed."""
    return b"\x00" + struct.pack(">I", len(body)) + body


def setting(key: int, value: int) -> bytes:
    return struct.pack(">HI", key, value)


def begin(*settings: bytes) -> bytes:
    return PREFACE + frame(SETTINGS, payload=b"".join(settings))


def request(headers: list[tuple[str, str]], stream: int = 1, flags: int = END_HEADERS) -> bytes:
    return frame(HEADERS, flags, stream, Encoder().encode(headers, huffman=False))


def generate() -> list[tuple[str, str]]:
    return [(key, value.replace("GetLoad", "Generate")) for key, value in GOOD]


# --- what is sent, and whether the server owes an answer to it ---


def noise(draw: Draw) -> tuple[bytes, bool]:
    return draw(st.sampled_from([b"", PREFACE[:10], PREFACE])) + draw(st.binary(max_size=400)), False


def random_frames(draw: Draw) -> tuple[bytes, bool]:
    parts = st.builds(
        frame, st.integers(0, 12), st.integers(0, 255), st.sampled_from([0, 1, 2, 3, 2**31 - 1, 2**31]), st.binary(max_size=64)
    )
    return begin() + b"".join(draw(st.lists(parts, max_size=12))), False


def half_a_request(draw: Draw) -> tuple[bytes, bool]:
    whole = begin() + request(generate()) + frame(DATA, END_STREAM, 1, message(GENERATE))
    return whole[: draw(st.integers(0, len(whole) - 1))], False


def oversized_frame(draw: Draw) -> tuple[bytes, bool]:
    announced = struct.pack(">I", draw(st.integers(16385, 2**24 - 1)))[1:]
    head = announced + bytes([draw(st.integers(0, 9)), draw(st.integers(0, 255))]) + struct.pack(">I", draw(st.integers(0, 3)))
    return begin() + head + bytes(draw(st.sampled_from([0, 100, 70_000]))), False


def odd_headers(draw: Draw) -> tuple[bytes, bool]:
    extra = draw(
        st.lists(st.tuples(st.sampled_from(NAMES), st.one_of(st.sampled_from(VALUES), st.text(max_size=30))), min_size=1, max_size=6)
    )
    left_out = draw(st.sampled_from([None, None, *range(len(GOOD))]))
    headers = [pair for place, pair in enumerate(GOOD) if place != left_out] + extra * draw(st.sampled_from([1, 1, 20]))
    return begin() + request(headers, flags=END_HEADERS) + frame(DATA, END_STREAM, 1, message(b"")), True


def random_hpack(draw: Draw) -> tuple[bytes, bool]:
    return begin() + frame(HEADERS, END_HEADERS | END_STREAM, 1, draw(st.binary(max_size=200))), False


def continuation_flood(draw: Draw) -> tuple[bytes, bool]:
    piece = frame(CONTINUATION, 0, 1, draw(st.sampled_from([b"", b"\x00", bytes(1000)])))
    return begin() + request(GOOD, flags=0) + piece * draw(st.integers(1, 1000)), False


def rapid_reset(draw: Draw) -> tuple[bytes, bool]:
    code, body = struct.pack(">I", draw(st.integers(0, 13))), draw(st.booleans())
    sent = [begin()]
    for stream in range(1, 2 * draw(st.integers(1, 200)), 2):
        sent.append(request(generate(), stream) + (frame(DATA, END_STREAM, stream, message(GENERATE)) if body else b""))
        sent.append(frame(RST_STREAM, 0, stream, code))
    return b"".join(sent), False


def flood(draw: Draw) -> tuple[bytes, bool]:
    piece = draw(
        st.sampled_from(
            [
                frame(SETTINGS, payload=setting(INITIAL_WINDOW_SIZE, 1)),
                frame(SETTINGS),
                frame(PING, payload=bytes(8)),
                frame(PRIORITY, 0, 1, bytes(5)),
                frame(WINDOW_UPDATE, payload=struct.pack(">I", 1)),
                frame(DATA, 0, 1),
                frame(0x55, 0, 0, bytes(10)),
            ]
        )
    )
    return begin() + request(GOOD) + piece * draw(st.integers(1, 1000)), False


def closed_window(draw: Draw) -> tuple[bytes, bool]:
    """A stream that nothing may be sent on; or one whose window overflows."""
    updates = frame(WINDOW_UPDATE, 0, draw(st.integers(0, 1)), struct.pack(">I", draw(st.sampled_from([0, 1, 2**31 - 1])))) * 2
    body = request(generate()) + frame(DATA, END_STREAM, 1, message(GENERATE))
    return begin(setting(INITIAL_WINDOW_SIZE, draw(st.sampled_from([0, 1, 2**31 - 1, 2**31])))) + body + updates, False


def odd_message(draw: Draw) -> tuple[bytes, bool]:
    """A good call, whose message's frame lies."""
    body = draw(st.one_of(st.just(GENERATE), st.binary(max_size=60)))
    length = draw(st.sampled_from([len(body), 0, 1, len(body) + 1, 5 << 20, 2**32 - 1]))
    framed = bytes([draw(st.sampled_from([0, 0, 0, 1, 2, 255]))]) + struct.pack(">I", length) + body
    framed = framed * draw(st.integers(0, 2)) + framed[: draw(st.integers(0, len(framed)))]
    cut = draw(st.integers(0, len(framed)))
    pieces = frame(DATA, 0, 1, framed[:cut]) + frame(DATA, END_STREAM, 1, framed[cut:])
    return begin() + request(draw(st.sampled_from([generate(), GOOD]))) + pieces, True


SCENARIOS = [
    noise,
    random_frames,
    half_a_request,
    oversized_frame,
    odd_headers,
    random_hpack,
    continuation_flood,
    rapid_reset,
    flood,
    closed_window,
    odd_message,
]


@st.composite
def connections(draw: Draw) -> tuple[str, bytes, bool]:
    """A scenario's name, the bytes to send, and whether an answer is owed."""
    scenario = draw(st.sampled_from(SCENARIOS))
    return (scenario.__name__, *scenario(draw))


# --- what comes back ---


def attack(address: tuple[str, int], sent: bytes, owed: bool) -> str:
    """Send, and wait for an answer where one is owed; then for the server to let go of the connection.

    Gives how it ended. Raises AssertionError where an answer is missing or is none, and where the server holds on to a closed connection.
    """
    with socket.create_connection(address, timeout=LIMIT_S) as connection:
        try:
            connection.sendall(sent)
            ended = _answer(connection) if owed else ""
            connection.shutdown(socket.SHUT_WR)
            end = time.monotonic() + LIMIT_S
            while connection.recv(1 << 16):
                assert time.monotonic() < end, "the server goes on sending to a client that has gone"
        except TimeoutError:
            raise AssertionError(f"no answer, or not the end of the connection, within {LIMIT_S:g} s") from None
        except OSError:
            return "reset"
    return ended or "closed"


def _answer(connection: socket.socket) -> str:
    """How stream 1 ended, or the connection."""
    decoder, received = Decoder(), connection.makefile("rb")
    while True:
        head = received.read(9)
        if len(head) < 9:
            return "closed"
        length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        stream, payload = int.from_bytes(head[5:9], "big"), received.read(length)
        if kind == GOAWAY:
            return "GOAWAY"
        if kind == RST_STREAM and stream == 1:
            return "RST_STREAM"
        if kind == HEADERS:
            try:
                headers = {str(name): str(value) for name, value in decoder.decode(payload)}
            except HPACKError as error:
                raise AssertionError(f"headers that cannot be decoded: {error}") from None
            if flags & END_STREAM:
                assert "grpc-status" in headers or headers.get(":status") not in (None, "200"), f"no status: {headers}"
                return f"status {headers.get('grpc-status', headers.get(':status'))}"
