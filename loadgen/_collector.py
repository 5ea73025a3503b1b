"""The part of a Locust process that the user started: it merges what the drivers measure, and reports once a run."""

from __future__ import annotations

import logging
import time
from typing import Any, cast

import gevent  # type: ignore[import-untyped]
import msgspec
from locust.env import Environment
from locust.rpc import Message
from locust.runners import MasterRunner

from loadgen._config import resolved
from loadgen._driver import CANNOT_START, MEASURES, RESET, STOP
from loadgen._measures import Measures
from loadgen._report import print_summary, summarize, write_summary

log = logging.getLogger(__name__)

_LAST_REPORTS_S = 10.0
"""How long workers may take to cancel their streams and report, beyond --stop-timeout."""


class Collector:
    """Every window (a run, or what follows a reset within it) has a number, so that late reports of the one before it are told apart."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._runner = cast(Any, environment.runner)
        self._runner.register_message(MEASURES, self._merge)
        self._runner.register_message(CANNOT_START, self._give_up)
        self._options = cast(Any, environment.parsed_options)
        self._options.loadgen_epoch = 0
        self._running: set[str] = set()
        self._unreported = False
        self._ending = False
        self._warming = False
        self._timer = gevent.Greenlet()
        self._measures = Measures()

    def begin(self, **_: Any) -> None:
        """Locust's test_start. The window's number travels to the workers with the options."""
        self._open_window()
        self._running.clear()
        self._unreported = True
        self._ending = False
        self._timer.kill()
        self._loadtest = resolved(self._environment).loadtest
        self._warming = self._loadtest.warmup_requests > 0 or self._loadtest.warmup_s > 0
        self._began_s = time.monotonic()
        self._environment.process_exit_code = None

    def reset(self, **_: Any) -> None:
        """Locust's reset_stats."""
        self._open_window()
        self._runner.send_message(RESET, {"epoch": self._options.loadgen_epoch})

    def spawned(self, **_: Any) -> None:
        """Locust's spawning_complete, at which --reset-stats counts from zero."""
        if self._environment.reset_stats:
            self.reset()

    def stopping(self, **_: Any) -> None:
        """Locust's test_stopping. Locust gives workers half a second for their last report when it quits; wait until each has made it."""
        if not isinstance(self._runner, MasterRunner) or not self._unreported:
            return
        self._runner.send_message(STOP)
        with gevent.Timeout(self._environment.stop_timeout + _LAST_REPORTS_S, False):
            while self._running:
                gevent.sleep(0.02)
        if self._running:
            log.warning("%d workers did not make their last report: the summary misses their last second", len(self._running))

    def end(self, **_: Any) -> None:
        """Locust's test_stop."""
        if not self._options.headless:
            self._report()

    def quit(self, **_: Any) -> None:
        """Locust's quit: after its own tables, so that the summary is the last on the terminal."""
        self._report()

    @property
    def summary(self) -> dict[str, Any]:
        """The window so far."""
        return summarize(self._measures, resolved(self._environment), self._environment.host or "", self._runner.target_user_count)

    def _open_window(self) -> None:
        self._options.loadgen_epoch += 1
        self._measures = Measures()

    def _merge(self, msg: Message, **_: Any) -> None:
        if msg.data["final"]:
            self._running.discard(msg.node_id)
        else:
            self._running.add(msg.node_id)
        if msg.data["epoch"] == self._options.loadgen_epoch:
            self._measures.merge(msgspec.msgpack.decode(msg.data["measures"], type=Measures))
            if not msg.data["final"]:
                self._advance()

    def _advance(self) -> None:
        """From the warm-up to the window, and from there to the end where it is set by a number of requests."""
        ended, loadtest = self._measures.completed + self._measures.failed, self._loadtest
        if self._warming:
            enough = ended >= loadtest.warmup_requests * self._runner.target_user_count
            if enough and time.monotonic() - self._began_s >= loadtest.warmup_s:
                self._warming = False
                self.reset()
                if self._options.loadgen_timed:
                    self._timer = gevent.spawn_later(loadtest.duration_s, self._end_run)
        elif loadtest.requests and ended >= loadtest.requests:
            self._end_run()

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

    def _report(self) -> None:
        if not self._unreported:
            return
        self._unreported = False
        if self._warming:
            log.warning("the run ended in its warm-up: nothing was measured")
            self._measures = Measures()
        summary = self.summary
        print_summary(summary)
        if not self._options.json_out:
            return
        try:
            write_summary(summary, self._options.json_out)
        except OSError as error:
            log.error("cannot write %s: %s", self._options.json_out, error.strerror)
