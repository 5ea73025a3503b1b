"""Reads spans back from JSON-lines files and joins them into requests: client span, server span, and the server's children."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from inference_service.telemetry import names


class TraceFileError(ValueError):
    """A file has no traces to read; the message names it."""


class Event(msgspec.Struct):
    """What happened within a span."""

    name: str
    time_ns: int


class Span(msgspec.Struct):
    """A line of a trace file; see `exporter.span_record`. Times are nanoseconds since the Unix epoch."""

    trace_id: str
    span_id: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    parent_id: str = ""
    service: str = ""
    attributes: dict[str, object] = {}
    events: list[Event] = []

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def code(self) -> str:
        return str(self.attributes.get(names.RPC_STATUS, "?"))

    @property
    def ttft_ns(self) -> int | None:
        """From start to first token; None: there was none."""
        return next((event.time_ns - self.start_ns for event in self.events if event.name == names.FIRST_TOKEN_EVENT), None)

    @property
    def tpot_ns(self) -> float | None:
        """Time per output token after the first; None: there were not two."""
        seconds = self.attributes.get(names.TIME_PER_OUTPUT_TOKEN)
        return seconds * 1e9 if isinstance(seconds, int | float) else None


@dataclass
class Request:
    """What is known of one request; at least one of client and server."""

    client: Span | None = None
    server: Span | None = None
    phases: dict[str, Span] = field(default_factory=dict)
    """The server's children by name, in the order of their times."""

    @property
    def outer(self) -> Span:
        """The client's span, else the server's."""
        span = self.client or self.server
        assert span is not None
        return span

    @property
    def spans(self) -> Iterator[tuple[str, Span]]:
        """All with what to call them, outermost first."""
        for name, span in (("client", self.client), ("server", self.server), *self.phases.items()):
            if span is not None:
                yield name, span


def read_spans(paths: Sequence[str | Path]) -> tuple[list[Span], int]:
    """All spans of the files, and how many lines are not spans (a last line may be torn, and does not count).

    Raises TraceFileError for a file that is missing or has no span.
    """
    spans: list[Span] = []
    bad_lines = 0
    for path in map(Path, paths):
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            raise TraceFileError(f"{path}: no such file; a server writes telemetry.trace_file, a load test its own") from None
        except OSError as error:
            raise TraceFileError(f"{path}: {error.strerror}") from None
        found, bad = _parse(lines)
        if not found:
            raise TraceFileError(f"{path}: no spans in it" if any(lines) else f"{path}: the file is empty; no request has ended yet")
        spans += found
        bad_lines += bad
    return spans, bad_lines


def join(spans: Iterable[Span]) -> list[Request]:
    """Requests, in the order of their starts: a server span belongs to the client span that is its parent, if that is there."""
    spans = list(spans)
    requests = [Request(client=span) for span in spans if span.kind == "CLIENT"]
    by_client = {(request.outer.trace_id, request.outer.span_id): request for request in requests}
    by_server: dict[tuple[str, str], Request] = {}
    for span in spans:
        if span.kind == "SERVER":
            request = by_client.get((span.trace_id, span.parent_id))
            if request is None or request.server is not None:  # a client that tried again has several
                request = Request()
                requests.append(request)
            request.server = span
            by_server[span.trace_id, span.span_id] = request
    for span in sorted(spans, key=lambda span: span.start_ns):
        if span.kind == "INTERNAL" and (request := by_server.get((span.trace_id, span.parent_id))):
            request.phases[span.name] = span
    return sorted(requests, key=lambda request: request.outer.start_ns)


def _parse(lines: list[bytes]) -> tuple[list[Span], int]:
    decoder = msgspec.json.Decoder(Span)
    spans, bad = [], 0
    for line in filter(None, lines):
        try:
            spans.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            bad += line is not lines[-1]
    return spans, bad
