"""The part of a Locust process that sends requests: a single process, or a worker.

It measures on its own and sends what it has measured, once a second and when it has stopped, to the collector: a Locust message, which
a single process delivers to itself.
"""

from __future__ import annotations

import signal
import time
from functools import cache
from typing import Any, cast

import gevent  # type: ignore[import-untyped]
import grpc.experimental.gevent
import msgspec
from locust.env import Environment
from locust.exception import StopUser
from locust.rpc import Message

from inference_service.config import Config
from inference_service.telemetry import names
from inference_service.telemetry.tracing import Tracing
from loadgen._config import resolved
from loadgen._measures import Measures
from loadgen._target import Failure, Observation, Target, TargetError
from loadgen._targets import make_target
from loadgen._workload import SyntheticWorkload

# To the collector
MEASURES = "loadgen_measures"
CANNOT_START = "loadgen_cannot_start"
# From the collector
RESET = "loadgen_reset"
STOP = "loadgen_stop"

_REPORT_S = 1.0
_LAG_PROBE_NS = 10_000_000
_FAILURE_PAUSE_S = 0.1
"""A user waits so long after a failure: a server that refuses at once must not be hammered by a busy loop."""


class RequestFailed(Exception):
    """Shown in Locust's own table of failures, one line a text: so without the message, in which ids or times may differ."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind}: {failure.code}")


class Driver:
    """Makes one request after the other for each user, over one target."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._runner = cast(Any, environment.runner)
        self._events = cast(Any, environment.events)
        self._runner.register_message(RESET, self._reset)
        self._runner.register_message(STOP, self._stop)
        self._target: Target | None = None
        self._quitting = False
        self._epoch = 0
        self._open_window()

    def begin(self, **_: Any) -> None:
        """Locust's test_start, before any user runs: connect, and make sure that the target can do what is asked."""
        if self._quitting:
            return  # the first worker to leave makes the master hand its users to the others
        _prepare_process()
        config = resolved(self._environment)
        self._tracing = _tracing(config)
        try:
            self._target = make_target(self._environment.host or "", config.loadtest.timeout_s, self._tracing)
            self._workload = SyntheticWorkload(config.loadtest, self._target.model(), max(self._runner.worker_index, 0))
        except TargetError as error:
            self._close()
            self._runner.send_message(CANNOT_START, {"error": str(error)})
            return
        assert self._environment.parsed_options is not None
        self._epoch = self._environment.parsed_options.loadgen_epoch
        self._open_window()
        self._background = [gevent.spawn(self._report_forever), gevent.spawn(self._watch_lag)]

    def send_one(self) -> None:
        """One request, to its end: one Locust event, and one entry in our own measures."""
        target = self._target
        if target is None:
            raise StopUser
        request = self._workload.next()
        observation = Observation()
        try:
            target.generate(request, observation)
        finally:
            # Also where the run's end kills the user, which is no request of Locust's.
            self._measures.add(observation, self._since_ns)
        failure = observation.failure
        self._events.request.fire(
            request_type=target.protocol,
            name="generate",
            response_time=(observation.ended_ns - observation.sent_ns) / 1e6,
            response_length=0,
            exception=RequestFailed(failure) if failure else None,
            context={},
        )
        if failure:
            gevent.sleep(_FAILURE_PAUSE_S)

    def end(self, **_: Any) -> None:
        """Locust's test_stop, after all users have ended."""
        if self._target is None:
            return
        gevent.killall(self._background)
        self._report(final=True)
        self._close()

    def quitting(self, **_: Any) -> None:
        """Locust's quitting. After a Ctrl-C a worker would say goodbye first and stop then; the collector would miss its last report."""
        self._quitting = True
        self._runner.stop()

    def _close(self) -> None:
        if self._target is not None:
            self._target.close()
            self._target = None
        self._tracing.shutdown()

    def _open_window(self) -> None:
        self._measures = Measures()
        self._since_ns = time.monotonic_ns()
        self._since_unix_ns = time.time_ns()
        self._usage_since = (self._since_ns, time.process_time_ns())

    def _report_forever(self) -> None:
        while True:
            self._report(final=False)
            gevent.sleep(_REPORT_S)

    def _report(self, final: bool) -> None:
        measures, self._measures = self._measures, Measures()
        measures.began_unix_ns, measures.ended_unix_ns = self._since_unix_ns, time.time_ns()
        (wall_ns, cpu_ns), self._usage_since = self._usage_since, (time.monotonic_ns(), time.process_time_ns())
        measures.add_usage(self._usage_since[0] - wall_ns, self._usage_since[1] - cpu_ns)
        data = {"epoch": self._epoch, "final": final, "measures": msgspec.msgpack.encode(measures)}
        self._runner.send_message(MEASURES, data)

    def _watch_lag(self) -> None:
        """A message may be read as late as this greenlet wakes."""
        while True:
            # The loop counts from when it last looked at the clock.
            gevent.get_hub().loop.update_now()
            due_ns = time.monotonic_ns() + _LAG_PROBE_NS
            gevent.sleep(_LAG_PROBE_NS / 1e9)
            self._measures.receive_lag.add(max(0, time.monotonic_ns() - due_ns))

    def _reset(self, msg: Message, **_: Any) -> None:
        self._epoch = msg.data["epoch"]
        self._open_window()

    def _stop(self, **_: Any) -> None:
        self._runner.stop()


@cache
def _prepare_process() -> None:
    """Make gRPC, the target's and the trace exporter's, wait on gevent's loop. Once a process, after Locust's fork, before any channel."""
    grpc.experimental.gevent.init_gevent()
    # A Ctrl-C would strike whichever greenlet runs: inside gRPC it would leave a lock held. Locust expects it in the main greenlet.
    gevent.signal_handler(signal.SIGINT, gevent.get_hub().handle_system_error, KeyboardInterrupt, KeyboardInterrupt())


def _tracing(config: Config) -> Tracing:
    """The client's spans go where the service's go, but not into the same file: the service may run with another directory."""
    return Tracing(msgspec.structs.replace(config.telemetry, trace_file=config.loadtest.trace_file), names.LOADGEN_SERVICE)
