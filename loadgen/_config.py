"""Options beside Locust's own, and the one YAML file that the service reads too.

Only the process that the user started reads the file; Locust hands the result to every worker, which may run on another machine.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import msgspec
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from inference_service.config import Config, ConfigError, load_config
from loadgen._levels import check
from loadgen._trace import read_trace

_MAX_SPAWN_RATE = 100
"""Users a second; Locust warns of more."""


def add_options(parser: LocustArgumentParser) -> None:
    """Named apart from Locust's own --config (its options file), --json and --json-file (its own statistics)."""
    group = parser.add_argument_group("Load generator")
    add = group.add_argument
    add("--loadgen-config", metavar="FILE", env_var="LOADGEN_CONFIG", help="YAML file; its section `loadtest` is the load test")
    add("--target", metavar="URL", help="what to load, such as grpc://127.0.0.1:50051; goes before --host and the file's loadtest.target")
    add("--set", metavar="KEY=VALUE", action="append", help="set section.key of the YAML file, such as loadtest.workload.input_tokens=512")
    add("--json-out", metavar="FILE", help="write the result to this file; goes before the file's loadtest.json_file")
    add("--html-out", metavar="FILE", help="write it there as a page with figures; goes before loadtest.html_file")
    add("--requests-out", metavar="FILE", help="write each request there as a line of JSON; goes before loadtest.requests_file")
    # A group does not take the keyword include_in_web_ui, which Locust's parser does.
    for action in group._group_actions:
        action.include_in_web_ui = False


def resolve(environment: Environment) -> None:
    """Read the YAML file, and take from it what the command line leaves open: host, users and spawn rate.

    Raises ConfigError.
    """
    options = _options(environment)
    config = load_config(options.loadgen_config, options.set)
    loadtest = config.loadtest
    # The web UI changes the host; Locust sends it to the workers.
    environment.host = options.target or environment.host or loadtest.target
    if options.num_users is not None:
        loadtest = msgspec.structs.replace(loadtest, concurrency=(options.num_users,))
        config = msgspec.structs.replace(config, loadtest=loadtest)
    check(loadtest)
    if loadtest.trace:
        read_trace(loadtest.trace)
    # What the web UI's form may change: one level of a closed loop.
    options.loadgen_simple = loadtest.arrival == "closed" and loadtest.repeats == len(loadtest.concurrency) == 1
    if options.num_users is None:
        options.num_users = loadtest.concurrency[0] if loadtest.arrival == "closed" else 1
    options.loadgen_spawn_rate = options.spawn_rate
    if options.spawn_rate is None:
        options.spawn_rate = min(options.num_users, _MAX_SPAWN_RATE)
    options.loadgen_timed = not options.loadgen_simple or (options.run_time is None and bool(options.headless or options.autostart))
    options.json_out = options.json_out or loadtest.json_file
    options.html_out = options.html_out or loadtest.html_file
    options.requests_out = options.requests_out or loadtest.requests_file
    for file in filter(None, (options.json_out, options.html_out, options.requests_out)):
        _make_folder(Path(file))
    options.loadgen_resolved = msgspec.to_builtins(config)


def resolved(environment: Environment) -> Config:
    """What `resolve` read, in any of the run's processes."""
    return msgspec.convert(_options(environment).loadgen_resolved, Config)


def _make_folder(file: Path) -> None:
    """Now, since it would be a pity to find out after the run."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    if file.is_dir():
        raise ConfigError(f"{file}: a folder, but the result is a file")


def _options(environment: Environment) -> Namespace:
    options = environment.parsed_options
    assert isinstance(options, Namespace)
    return options
