"""One line of JSON a request: made by the process that sent it, written by the one that the user started, wherever both run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import BinaryIO

import msgspec

from inference_service.telemetry.clock import to_unix_ns
from loadgen._result import RequestRecord
from loadgen._target import Observation, Request

log = logging.getLogger(__name__)


def record_of(request: Request, observation: Observation, level: str, process: int) -> RequestRecord:
    """What the file says of a request that is over."""
    arrivals, failure, sent_ns = observation.arrivals, observation.failure, observation.sent_ns
    return RequestRecord(
        level=level,
        number=request.index,
        turn=request.turn,
        process=process,
        trace_id=observation.trace_id,
        scheduled_unix_ns=_unix_ns(observation.scheduled_ns),
        sent_unix_ns=_unix_ns(sent_ns),
        first_token_unix_ns=_unix_ns(arrivals[0][0]) if arrivals else 0,
        last_token_unix_ns=_unix_ns(arrivals[-1][0]) if arrivals else 0,
        ended_unix_ns=_unix_ns(observation.ended_ns),
        outcome="cut_off" if observation.cut_off else failure.kind.value if failure else "completed",
        error=f"{failure.code}: {failure.message}" if failure else "",
        input_tokens=observation.input_tokens,
        cached_tokens=observation.cached_tokens,
        output_tokens=observation.output_tokens,
        messages=[(received_ns - sent_ns, tokens) for received_ns, tokens in arrivals],
        queue_ns=observation.queue_ns,
        server_ttft_ns=observation.server_ttft_ns,
    )


class RequestsFile:
    """The file, of one run. "": there is none."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.failed = False
        """Something could not be written."""
        self._file: BinaryIO | None = None
        if path:
            try:
                self._file = Path(path).open("wb")  # noqa: SIM115
            except OSError as error:
                self._complain(error)

    def write(self, records: list[RequestRecord]) -> None:
        if self._file is None or not records:
            return
        try:
            self._file.write(msgspec.json.Encoder().encode_lines(records))
        except OSError as error:
            self._complain(error)

    def close(self) -> None:
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            self._complain(error)
        self._file = None

    def _complain(self, error: OSError) -> None:
        """The figures are worth having without it."""
        self.failed, self._file = True, None
        log.error("cannot write %s: %s", self._path, error.strerror)


def _unix_ns(monotonic_ns: int) -> int:
    return to_unix_ns(monotonic_ns) if monotonic_ns else 0
