"""The part of a Locust process that sends requests: a single process, or a worker.

It measures on its own and sends what it has measured, once a second and at the end of a level, to the collector: a Locust message, which
a single process delivers to itself.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from functools import cache
from typing import Any, cast

import gevent  # type: ignore[import-untyped]
import grpc.experimental.gevent
import msgspec
from locust.env import Environment
from locust.exception import StopUser
from locust.rpc import Message

from inference_service.config import Config, ConfigError
from inference_service.telemetry import names
from inference_service.telemetry.tracing import Tracing
from loadgen._config import resolved
from loadgen._levels import Load
from loadgen._measures import Measures, Window
from loadgen._requests import record_of
from loadgen._result import RequestRecord
from loadgen._schedule import schedule
from loadgen._streams import Streams
from loadgen._target import Failure, Observation, Request, Target, TargetError
from loadgen._targets import make_target
from loadgen._trace import read_trace
from loadgen._workload import Workload

# To the collector
REPORT = "loadgen_report"
CANNOT_START = "loadgen_cannot_start"
# From the collector
LEVEL = "loadgen_level"
WINDOW = "loadgen_window"
CLOSE = "loadgen_close"
STOP = "loadgen_stop"

_REPORT_S = 1.0
_LAG_PROBE_NS = 10_000_000
_MOST_AHEAD_S = 2.0
"""A level's beginning that is further away is that of a clock which differs."""


class Report(msgspec.Struct, kw_only=True):
    """What a process tells the collector."""

    epoch: int
    measures: Measures
    """Since the report before; so are the records."""
    records: list[RequestRecord]
    """Of all requests that are over, where a file is to have them."""
    protocol: str
    model: str
    exhausted: bool
    """The schedule has no more requests."""
    drained: bool
    """The level is over for this process."""
    last: bool
    """The process has stopped."""


class RequestFailed(Exception):
    """Shown in Locust's own table of failures, one line a text: so without the message, in which ids or times may differ."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind}: {failure.code}")


class Driver:
    """Sends one process's share of each level's requests, over one target."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._runner = cast(Any, environment.runner)
        self._events = cast(Any, environment.events)
        self._runner.register_message(LEVEL, self._next_level)
        self._runner.register_message(WINDOW, self._reset)
        self._runner.register_message(CLOSE, self._close_level)
        self._runner.register_message(STOP, self._stop)
        self._target: Target | None = None
        self._quitting = False
        self._stopping = False
        self._window = Window()
        self._measures = Measures()
        self._records: list[RequestRecord] = []
        self._level = ""

    def begin(self, **_: Any) -> None:
        """Locust's test_start, before any user runs: connect, and make sure that the target can do what is asked."""
        if self._quitting:
            return  # the first worker to leave makes the master hand its users to the others
        _prepare_process()
        self._config = config = resolved(self._environment)
        self._options = cast(Any, self._environment.parsed_options)
        self._tracing = _tracing(config)
        self._rank, self._processes = self._place()
        try:
            self._target = make_target(self._environment.host or "", config.loadtest.timeout_s, self._tracing)
            model = self._target.model()
            workload = Workload(config, model, self._target.takes, self._rank, self._processes)
            self._trace = read_trace(config.loadtest.trace) if config.loadtest.trace else []
        except (TargetError, ConfigError) as error:
            self._disconnect()
            self._runner.send_message(CANNOT_START, {"error": str(error)})
            return
        self._stopping = False
        self._model = model.name
        self._workload = workload
        self._streams = Streams(self._target, workload, self._observed)
        self._epoch = self._options.loadgen_epoch
        self._exhausted = self._drained = False
        self._open_window()
        if self._options.loadgen_load:  # the run has begun without this process
            self._enter(msgspec.convert(self._options.loadgen_load, Load), self._epoch, self._options.loadgen_began_unix_ns)
        self._background = [gevent.spawn(self._report_forever), gevent.spawn(self._watch_lag)]

    def send_one(self) -> None:
        """One conversation of a user, to its end."""
        # A user who is still handed on while this process stops would send what nobody counts.
        if self._target is None or self._stopping:
            raise StopUser
        self._streams.serve_user()

    def stopping(self, **_: Any) -> None:
        """Locust's test_stopping, before it ends the users."""
        self._stopping = True
        if self._target is not None:
            self._streams.close()

    def end(self, **_: Any) -> None:
        """Locust's test_stop, after all users have ended."""
        if self._target is None:
            return
        self._streams.drain(self._environment.stop_timeout or 0)
        if self._target is None:
            return  # stopped once more while it drained
        gevent.killall(self._background)
        self._report(last=True)
        self._disconnect()

    def quitting(self, **_: Any) -> None:
        """Locust's quitting. After a Ctrl-C a worker would say goodbye first and stop then; the collector would miss its last report."""
        self._quitting = True
        self._runner.stop()

    def _place(self) -> tuple[int, int]:
        """This process's number among those that the run began with, and how many they are. One that joined later comes after them."""
        processes = self._options.loadgen_processes
        if self._runner.client_id in processes:
            return processes.index(self._runner.client_id), len(processes)
        return len(processes), len(processes) + 1

    def _disconnect(self) -> None:
        if self._target is not None:
            self._target.close()
            self._target = None
        self._tracing.shutdown()

    def _enter(self, load: Load, epoch: int, began_unix_ns: int) -> None:
        """Begin a level of load."""
        self._epoch = epoch
        self._level = load.name
        self._exhausted = self._drained = False
        ahead_ns = _ahead_ns(began_unix_ns) if load.rate else 0
        self._open_window(ahead_ns)
        if load.rate is None:
            self._streams.admit()
        elif self._rank < len(self._options.loadgen_processes):
            self._streams.dispatch(self._requests(load, self._window.since_ns), self._exhaust)

    def _requests(self, load: Load, began_ns: int) -> Iterator[tuple[Request, int]]:
        """This process's share of an open loop. A request is made before it is due."""
        for planned in schedule(self._config.loadtest, load, self._trace, self._rank, len(self._options.loadgen_processes)):
            request = self._workload.request(
                planned.index, input_tokens=planned.input_tokens, output_tokens=planned.output_tokens, prefix_ids=planned.prefix_ids
            )
            yield request, began_ns + int(planned.at_s * 1e9)

    def _exhaust(self) -> None:
        self._exhausted = True
        self._report()

    def _observed(self, request: Request, observation: Observation) -> None:
        """One request is over: one entry in our measures, and one event of Locust's unless it was cut off."""
        assert self._target is not None
        self._measures.add(observation, self._window)
        if self._options.requests_out:
            self._records.append(record_of(request, observation, self._level, self._rank))
        if observation.cut_off:
            return
        failure = observation.failure
        self._events.request.fire(
            request_type=self._target.protocol,
            name="generate",
            response_time=(observation.ended_ns - observation.sent_ns) / 1e6,
            response_length=0,
            exception=RequestFailed(failure) if failure else None,
            context={},
        )

    def _open_window(self, ahead_ns: int = 0) -> None:
        now_ns = time.monotonic_ns()
        self._measures = Measures()
        self._window = Window(since_ns=now_ns + ahead_ns, slo=self._config.loadtest.slo)
        self._window_unix_ns = (time.time_ns() + ahead_ns, 0)
        self._usage_since = (now_ns, time.process_time_ns())
        self._streams.most = 0

    def _report_forever(self) -> None:
        while True:
            self._report()
            gevent.sleep(_REPORT_S)

    def _report(self, last: bool = False) -> None:
        measures, self._measures = self._measures, Measures()
        records, self._records = self._records, []
        since_unix_ns, until_unix_ns = self._window_unix_ns
        measures.began_unix_ns, measures.ended_unix_ns = since_unix_ns, until_unix_ns or time.time_ns()
        measures.streams = self._streams.most
        (wall_ns, cpu_ns), self._usage_since = self._usage_since, (time.monotonic_ns(), time.process_time_ns())
        measures.add_usage(self._usage_since[0] - wall_ns, self._usage_since[1] - cpu_ns)
        report = Report(
            epoch=self._epoch,
            measures=measures,
            records=records,
            protocol=self._target.protocol if self._target else "",
            model=self._model,
            exhausted=self._exhausted,
            drained=self._drained,
            last=last,
        )
        self._runner.send_message(REPORT, {"report": msgspec.msgpack.encode(report)})

    def _watch_lag(self) -> None:
        """What a message that comes at any moment waits for this loop: so a long stall counts as often as a probe fits into it."""
        while True:
            # The loop counts from when it last looked at the clock.
            gevent.get_hub().loop.update_now()
            due_ns = time.monotonic_ns() + _LAG_PROBE_NS
            gevent.sleep(_LAG_PROBE_NS / 1e9)
            lag_ns = max(0, time.monotonic_ns() - due_ns)
            self._measures.receive_lag.extend(list(range(lag_ns, -1, -_LAG_PROBE_NS)))

    def _next_level(self, msg: Message, **_: Any) -> None:
        if self._target is not None:
            self._enter(msgspec.convert(msg.data["load"], Load), msg.data["epoch"], msg.data["began_unix_ns"])

    def _reset(self, msg: Message, **_: Any) -> None:
        if self._target is not None:
            self._epoch = msg.data["epoch"]
            self._open_window()

    def _close_level(self, msg: Message, **_: Any) -> None:
        """The window ends now; what is in flight may go on for a while."""
        if self._target is None:
            return
        self._streams.close()
        self._window.until_ns = time.monotonic_ns()
        self._window_unix_ns = (self._window_unix_ns[0], time.time_ns())
        gevent.spawn(self._drain, msg.data["drain_s"])

    def _drain(self, seconds: float) -> None:
        self._streams.drain(seconds)
        if self._target is not None:
            self._drained = True
            self._report()

    def _stop(self, **_: Any) -> None:
        self._runner.stop()


def _ahead_ns(unix_ns: int) -> int:
    """How long until a time in the near future; 0 where it is past, or where the clocks differ."""
    ahead_ns = unix_ns - time.time_ns()
    return ahead_ns if 0 < ahead_ns < _MOST_AHEAD_S * 1e9 else 0


@cache
def _prepare_process() -> None:
    """Make gRPC, the target's and the trace exporter's, wait on gevent's loop. Once a process, after Locust's fork, before any channel."""
    grpc.experimental.gevent.init_gevent()
    # A Ctrl-C would strike whichever greenlet runs: inside gRPC it would leave a lock held. Locust expects it in the main greenlet.
    gevent.signal_handler(signal.SIGINT, gevent.get_hub().handle_system_error, KeyboardInterrupt, KeyboardInterrupt())


def _tracing(config: Config) -> Tracing:
    """The client's spans go where the service's go, but not into the same file: the service may run with another directory."""
    return Tracing(msgspec.structs.replace(config.telemetry, trace_file=config.loadtest.trace_file), names.LOADGEN_SERVICE)
