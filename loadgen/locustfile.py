"""The load generator's Locust file, the one public module of the folder: `locust -f loadgen` from the root, or by path from anywhere."""

from __future__ import annotations

import sys
from typing import Any

import gevent  # type: ignore[import-untyped]
import locust
from locust import User, constant, task
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner
from locust.web import WebUI

from inference_service.config import ConfigError
from loadgen._collector import Collector
from loadgen._config import add_options, resolve
from loadgen._driver import Driver
from loadgen._web import add_tabs

events: Any = locust.events  # Any, since Locust leaves them untyped


class GenerateUser(User):
    """One of N users, each of whom sends a request as soon as the one before it has ended: a closed loop at concurrency N.

    In an open loop users only keep Locust going.
    """

    wait_time = constant(0)
    driver: Driver

    @task
    def generate(self) -> None:
        self.driver.send_one()


def wire(environment: Environment, web_ui: WebUI | None, **_: Any) -> None:
    """A worker drives, a master collects, a single process does both. The driver ends before the collector, which wants its last word."""
    # gevent's clock still shows when Locust began to load; without this the run would be shorter by as much.
    gevent.get_hub().loop.update_now()
    if not isinstance(environment.runner, WorkerRunner):
        try:
            resolve(environment)
        except ConfigError as error:
            sys.exit(f"loadgen: {error}")
        collector = Collector(environment)
        events.test_start.add_listener(collector.begin)
        events.reset_stats.add_listener(collector.reset)
        events.spawning_complete.add_listener(collector.spawned)
        events.test_stopping.add_listener(collector.stopping)
        # Locust asks those that listen to its quitting in reverse: the driver first.
        events.quitting.add_listener(collector.quitting)
    if not isinstance(environment.runner, MasterRunner):
        GenerateUser.driver = driver = Driver(environment)
        events.test_start.add_listener(driver.begin)
        events.test_stopping.add_listener(driver.stopping)
        events.test_stop.add_listener(driver.end)
        events.quitting.add_listener(driver.quitting)
    if not isinstance(environment.runner, WorkerRunner):
        events.test_stop.add_listener(collector.end)
        events.quit.add_listener(collector.quit)
        if web_ui:
            add_tabs(web_ui, collector)


events.init_command_line_parser.add_listener(add_options)
events.init.add_listener(wire)
