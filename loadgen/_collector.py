"""The part of a Locust process that the user started: it takes the run through its levels, merges what the drivers measure, and reports."""

from __future__ import annotations

import logging
import time
from typing import Any, cast

import gevent  # type: ignore[import-untyped]
import msgspec
from locust.env import Environment
from locust.rpc import Message
from locust.runners import STATE_RUNNING, MasterRunner

from loadgen._config import resolved
from loadgen._driver import CANNOT_START, CLOSE, LEVEL, REPORT, STOP, WINDOW, Report
from loadgen._figures import found, level_of, repeated
from loadgen._html import write_report
from loadgen._levels import Load, loads
from loadgen._measures import Measures
from loadgen._report import print_result, write_result
from loadgen._requests import RequestsFile
from loadgen._result import Level, Result
from loadgen._verdict import exit_status, judge_all

log = logging.getLogger(__name__)

_LAST_REPORTS_S = 10.0
"""How long workers may take to cancel their streams and report, beyond what they are given to drain."""
_CONNECT_S = 60.0
"""How long processes may take to connect to the target before the first level begins without those that have not."""
_TICK_S = 0.05
_LEAD_S = 0.3
"""An open loop's level begins so much after it is called, so that all processes begin at once."""
_STREAMS_A_PROCESS = 64
"""More are read late sooner or later; so that the user knows what to change."""


class Collector:
    """Every window (a level's warm-up, what follows it, what follows a reset) has a number, so that late reports are told apart."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._runner = cast(Any, environment.runner)
        self._runner.register_message(REPORT, self._merge)
        self._runner.register_message(CANNOT_START, self._give_up)
        self._options = cast(Any, environment.parsed_options)
        self._options.loadgen_epoch = 0
        self._running: set[str] = set()
        self._drained: set[str] = set()
        self._exhausted: set[str] = set()
        self._script = gevent.Greenlet()
        self._result: Result | None = None
        self._unreported = False
        self._ending = False
        self._load: Load | None = None
        self._measures = Measures()
        self._requests = RequestsFile("")
        self._levels: list[Level] = []

    def begin(self, **_: Any) -> None:
        """Locust's test_start. What a process must know to begin travels to it with the options."""
        self._config = resolved(self._environment)
        self._loadtest = self._config.loadtest
        self._levels = []
        self._protocol = self._model = ""
        self._began_unix_ns = time.time_ns()
        self._running.clear()
        self._unreported = True
        self._ending = False
        self._environment.process_exit_code = None
        self._requests = RequestsFile(self._options.requests_out)
        self._options.loadgen_processes = self._processes()
        self._options.loadgen_load = None
        self._options.loadgen_epoch += 1
        self._plan = loads(self._loadtest)
        # A search does not know how many it takes.
        self._planned = 0 if self._loadtest.search else len(list(loads(self._loadtest)))
        self._script.kill()
        self._script = gevent.spawn(self._run)

    def reset(self, **_: Any) -> None:
        """Locust's reset_stats: a new window of the level."""
        if self._load is not None:
            self._open_window()
            self._runner.send_message(WINDOW, {"epoch": self._options.loadgen_epoch})

    def spawned(self, **_: Any) -> None:
        """Locust's spawning_complete, at which --reset-stats counts from zero."""
        if self._environment.reset_stats:
            self.reset()

    def stopping(self, **_: Any) -> None:
        """Locust's test_stopping. Locust gives workers half a second for their last report when it quits; wait until each has made it."""
        self._script.kill()
        if not isinstance(self._runner, MasterRunner) or not self._unreported:
            return
        self._runner.send_message(STOP)
        with gevent.Timeout(self._environment.stop_timeout + _LAST_REPORTS_S, False):
            while self._running:
                gevent.sleep(0.02)
        if self._running:
            log.warning("%d workers did not make their last report: the result misses their last second", len(self._running))

    def end(self, **_: Any) -> None:
        """Locust's test_stop."""
        if not self._unreported:
            return
        if self._load is not None:
            if self._warming:
                log.warning("the run ended in its warm-up: nothing was measured")
                self._measures = Measures()
            self._leave(lost=len(self._running))
        self._requests.close()
        self._result = self._make_result()
        self._written = self._write(self._result)
        if not self._options.headless:
            self._report()

    def quitting(self, **_: Any) -> None:
        """Locust's quitting: end what still runs, now, since Locust asks for the exit status next."""
        if isinstance(self._runner, MasterRunner):
            self._runner.stop(send_stop_to_client=False)
        else:
            self._runner.stop()
        if self._result and (self._options.headless or self._options.autostart) and not self._runner.exceptions:
            failed = self._options.exit_code_on_error
            # Locust has the failures of the warm-up too; we those that its workers had not told it yet.
            if status := exit_status(self._result, failed) or int(not self._written):
                self._environment.process_exit_code = failed if self._runner.errors else status

    def quit(self, **_: Any) -> None:
        """Locust's quit: after its own tables, so that the summary is the last on the terminal."""
        self._report()

    @property
    def progress(self) -> list[tuple[str, Level]]:
        """(state, level) of those that have ended, and of the one that runs, as far as it is."""
        levels = [("done", level) for level in self._levels]
        if self._load is not None:
            live = level_of(self._measures, self._load, self._loadtest.slo, len(self._processes()))
            state = "warming up" if self._warming else "measuring"
            levels.append((f"{state}, {self._load.number + 1} of {self._planned}" if self._planned else state, live))
        return levels

    def _run(self) -> None:
        """All levels, one after the other, once every process has connected."""
        with gevent.Timeout(_CONNECT_S, False):
            while len(self._running) < len(self._options.loadgen_processes):
                gevent.sleep(_TICK_S)
        load = next(self._plan)
        if self._options.loadgen_simple:
            # As many users as the web UI was asked for.
            load = msgspec.structs.replace(load, concurrency=self._runner.target_user_count)
        while True:
            if load.concurrency not in (0, self._runner.target_user_count):
                self._set_users(load.concurrency)
            self._enter(load)
            self._measure()
            level = self._levels[-1]
            try:
                load = self._plan.send(level.slo is not None and level.slo.met)
            except StopIteration:
                break
        self._end_run()

    def _enter(self, load: Load) -> None:
        log.info("level %d: %s", load.number + 1, load.name)
        processes = len(self._options.loadgen_processes)
        if load.concurrency > _STREAMS_A_PROCESS * processes:
            wanted = -(-load.concurrency // _STREAMS_A_PROCESS)
            log.warning("%d streams in %d processes: --processes %d would read them in time", load.concurrency, processes, wanted)
        self._load = load
        self._warming = self._loadtest.warmup_requests > 0 or self._loadtest.warmup_s > 0
        self._drained.clear()
        self._exhausted.clear()
        self._open_window()
        self._entered_s = self._opened_s
        began_unix_ns = time.time_ns()
        if load.rate:
            self._opened_s += _LEAD_S
            began_unix_ns += int(_LEAD_S * 1e9)
        # For those that join later, too.
        self._options.loadgen_load, self._options.loadgen_began_unix_ns = msgspec.to_builtins(load), began_unix_ns
        level = {"load": self._options.loadgen_load, "epoch": self._options.loadgen_epoch, "began_unix_ns": began_unix_ns}
        self._runner.send_message(LEVEL, level)

    def _measure(self) -> None:
        """The level that was entered: its warm-up, its window, its drain."""
        while self._warming:
            gevent.sleep(_TICK_S)
            self._warming = not self._is_warm()
        if self._loadtest.warmup_requests or self._loadtest.warmup_s:
            self.reset()
        while not self._is_over():
            gevent.sleep(_TICK_S)
        self._runner.send_message(CLOSE, {"drain_s": self._loadtest.drain_s})
        with gevent.Timeout(self._loadtest.drain_s + _LAST_REPORTS_S, False):
            while self._alive - self._drained:
                gevent.sleep(_TICK_S)
        self._leave(lost=len(self._running - self._drained))
        # The next level does not wait for those that were lost.
        self._running &= self._drained

    def _is_warm(self) -> bool:
        assert self._load is not None
        ended = self._measures.completed + self._measures.failed
        enough = ended >= self._loadtest.warmup_requests * max(1, self._load.concurrency)
        return self._all_exhausted() or (enough and time.monotonic() - self._entered_s >= self._loadtest.warmup_s)

    def _is_over(self) -> bool:
        assert self._load is not None
        if self._loadtest.requests and self._measures.completed + self._measures.failed >= self._loadtest.requests:
            return True
        if self._load.arrival == "trace":
            return self._all_exhausted()
        return bool(self._options.loadgen_timed) and time.monotonic() - self._opened_s >= self._loadtest.duration_s

    def _all_exhausted(self) -> bool:
        return bool(self._running) and self._exhausted >= self._alive

    @property
    def _alive(self) -> set[str]:
        """Of the processes that run, those that Locust still hears of: nobody waits for one that was killed."""
        return self._running & set(self._processes()) if isinstance(self._runner, MasterRunner) else self._running

    def _leave(self, lost: int) -> None:
        assert self._load is not None
        if self._options.loadgen_simple:
            # The web UI may have changed it since.
            self._load = msgspec.structs.replace(self._load, concurrency=self._runner.target_user_count)
        level = level_of(self._measures, self._load, self._loadtest.slo, len(self._options.loadgen_processes), lost)
        self._levels.append(level)
        self._load = None
        # Whatever comes from now on is of no window.
        self._options.loadgen_epoch += 1

    def _set_users(self, users: int) -> None:
        """Nobody sends in the meantime."""
        with gevent.Timeout(_LAST_REPORTS_S, False):
            while self._runner.state != STATE_RUNNING:
                gevent.sleep(_TICK_S)
        rate = self._options.loadgen_spawn_rate or min(max(users, self._runner.target_user_count), 100)
        self._runner.start(users, rate)
        with gevent.Timeout(users / rate + _LAST_REPORTS_S, False):
            while self._runner.user_count != users:
                gevent.sleep(_TICK_S)

    def _processes(self) -> list[str]:
        """The ids of those that drive, which number them."""
        if not isinstance(self._runner, MasterRunner):
            return [self._runner.client_id]
        clients = self._runner.clients
        return sorted(client.id for client in clients.ready + clients.spawning + clients.running)

    def _open_window(self) -> None:
        self._options.loadgen_epoch += 1
        self._opened_s = time.monotonic()
        self._measures = Measures()

    def _merge(self, msg: Message, **_: Any) -> None:
        report = msgspec.msgpack.decode(msg.data["report"], type=Report)
        (self._running.discard if report.last else self._running.add)(msg.node_id)
        self._requests.write(report.records)
        if report.epoch != self._options.loadgen_epoch:
            return
        self._measures.merge(report.measures)
        self._protocol, self._model = report.protocol or self._protocol, report.model
        if report.exhausted:
            self._exhausted.add(msg.node_id)
        if report.drained:
            self._drained.add(msg.node_id)

    def _end_run(self) -> None:
        if self._ending:
            return
        self._ending = True
        # Not in this greenlet: it may be one of those that are ended.
        gevent.spawn(self._runner.quit if self._options.headless else self._runner.stop)

    def _give_up(self, msg: Message, **_: Any) -> None:
        if self._ending:
            return
        self._unreported = False
        log.error("%s", msg.data["error"])
        self._environment.process_exit_code = 1
        self._end_run()

    def _make_result(self) -> Result:
        return Result(
            target=self._environment.host or "",
            protocol=self._protocol,
            model=self._model,
            began_unix_ns=self._began_unix_ns,
            loadtest=msgspec.to_builtins(self._loadtest),
            levels=self._levels,
            repeated=repeated(self._levels),
            search=found(self._levels) if self._loadtest.search else None,
            verdict=judge_all([(level.name, level.verdict) for level in self._levels]),
        )

    def _report(self) -> None:
        if not self._unreported or self._result is None:
            return
        self._unreported = False
        print_result(self._result)

    def _write(self, result: Result) -> bool:
        """Whether all files could be written."""
        written = not self._requests.failed
        for path, write in ((self._options.json_out, write_result), (self._options.html_out, write_report)):
            try:
                if path:
                    write(result, path)
            except OSError as error:
                log.error("cannot write %s: %s", path, error.strerror)
                written = False
        return written
