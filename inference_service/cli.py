"""The command line: serve, generate, check, size, prebuild, fetch, traces."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from inference_service import __version__
from inference_service.config import Config, ConfigError, load_config


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. Errors that a person can mend end with one line and status 1, wrong usage with status 2."""
    args = _parser().parse_args(argv)
    if os.getpid() == 1:
        # The first process of a container is spared what a signal does by default: until a server handles SIGTERM, it would be lost.
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        args.run(args)
    except (ConfigError, RuntimeError, ValueError, OSError) as error:
        sys.exit(f"inference-service {args.command}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="inference-service", description="Generate text over gRPC: serve a model, ask it, look at its traces."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    configured = argparse.ArgumentParser(add_help=False)
    configured.add_argument("--config", metavar="FILE", help="YAML file; without it, the defaults")
    configured.add_argument("--set", metavar="SECTION.KEY=VALUE", action="append", default=[], help="override a value; may be repeated")

    serve = commands.add_parser("serve", parents=[configured], help="serve the model until SIGTERM or SIGINT, then drain")
    serve.set_defaults(run=_serve)

    generate = commands.add_parser("generate", help="stream one answer from a running server to the terminal")
    generate.add_argument("prompt", help="what to say to the model, as one chat message of the user")
    generate.add_argument(
        "--target", default="127.0.0.1:50051", metavar="HOST:PORT", help="grpcs://HOST:PORT for TLS; a token is taken from INFERENCE_TOKEN"
    )
    generate.add_argument("--raw", action="store_true", help="continue the prompt as plain text, without the chat template")
    generate.add_argument("--system", default="", help="a system message before the prompt")
    generate.add_argument("--max-tokens", type=int, default=256)
    generate.add_argument("--temperature", type=float, help="default: 0, or of several answers the model's own")
    generate.add_argument("--seed", type=int)
    generate.add_argument("--n", type=int, default=1, help="how many answers; several are printed one by one, each once it is whole")
    generate.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS")
    generate.set_defaults(run=_generate)

    check = commands.add_parser("check", parents=[configured], help="show the configuration with what is derived, and the kernels chosen")
    check.set_defaults(run=_check)

    prebuild = commands.add_parser(
        "prebuild", parents=[configured], help="compile and measure the kernels that the model needs on this GPU"
    )
    prebuild.add_argument("--if-missing", action="store_true", help="only where nothing is kept for this GPU, libraries and model")
    prebuild.set_defaults(run=_prebuild)

    size = commands.add_parser("size", parents=[configured], help="show whether the model fits a GPU, and how many requests")
    memory = size.add_mutually_exclusive_group(required=True)
    memory.add_argument("--gpu", type=str.lower, metavar="NAME", help="such as h100; an unknown name prints them all")
    memory.add_argument("--memory-gib", type=float, metavar="GIB", help="for another one, its memory as CUDA tells it")
    size.set_defaults(run=_size)

    fetch = commands.add_parser("fetch", help="bring a model into the cache and print its directory")
    fetch.add_argument("model", nargs="?", default=Config().model.path, help="a known name or a hub id (default: %(default)s)")
    fetch.set_defaults(run=_fetch)

    traces = commands.add_parser("traces", help="summarise trace files: TTFT by percentile, the slowest requests as waterfalls")
    traces.add_argument("files", nargs="*", default=[Config().telemetry.trace_file], metavar="FILE")
    traces.add_argument("--slowest", type=int, default=5, metavar="N", help="how many waterfalls (default: %(default)s)")
    traces.set_defaults(run=_traces)
    return parser


def _serve(args: argparse.Namespace) -> None:
    from inference_service.telemetry.logs import configure_logs

    config = load_config(args.config, args.set)
    configure_logs("server", config.telemetry.log_format)
    if config.server.workers == 1:
        from inference_service.rpc.server import serve

        serve(config)
    else:
        from inference_service.rpc.supervisor import supervise

        supervise(config)


def _generate(args: argparse.Namespace) -> None:
    from inference_service.client import Client
    from inference_service.client_messages import Completions

    messages = [{"role": "system", "content": args.system}] if args.system else []
    prompt = args.prompt if args.raw else [*messages, {"role": "user", "content": args.prompt}]
    temperature = 0.0 if args.temperature is None and args.n == 1 else args.temperature
    fields = {"max_tokens": args.max_tokens, "temperature": temperature, "seed": args.seed, "n": args.n}
    completions = Completions()
    with Client(args.target) as client:
        for event in client.generate(prompt, timeout=args.timeout, **fields):
            completion = completions.add(event)
            if args.n == 1:
                print(event.delta.text, end="", flush=True)
            elif completion and completion.finish_reason:
                print(f"--- choice {event.finished.index} ---\n{completion.text}", flush=True)
    if args.n == 1:
        print()


def _check(args: argparse.Namespace) -> None:
    from inference_service.check import print_check

    print_check(load_config(args.config, args.set))


def _prebuild(args: argparse.Namespace) -> None:
    from inference_service.prebuild import prebuild

    prebuild(load_config(args.config, args.set), lambda line: print(line, flush=True), args.if_missing)


def _size(args: argparse.Namespace) -> None:
    from inference_service.size import print_size

    print_size(load_config(args.config, args.set), args.gpu, args.memory_gib)


def _fetch(args: argparse.Namespace) -> None:
    from inference_service.fetch import resolve_model

    print(resolve_model(args.model))


def _traces(args: argparse.Namespace) -> None:
    from inference_service.telemetry.summary import print_traces

    print_traces(args.files, slowest=args.slowest)


if __name__ == "__main__":
    main()
