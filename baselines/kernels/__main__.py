"""Times single operators, backend against backend, on the machine at hand.

    python -m baselines.kernels [--config FILE] [--operators attention_decode,moe] [--json results/kernels.jsonl] [--resume]
    python -m baselines.kernels --plot results/kernels.jsonl --images docs/images

Each backend is checked against the float32 reference in plain PyTorch, then timed in a CUDA graph on inputs that the caches do not hold.
A backend that this machine lacks is left out with the reason, and so is a result that is wrong. Without --config the shape is
Qwen3-30B-A3B's. --plot prints the tables of an earlier run, and with --images draws its pictures, on any machine.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from baselines.kernels.record import Record, read
from baselines.kernels.table import tables
from inference_service.config import ConfigError

FAMILIES: dict[tuple[str, ...], float] = {
    ("attention_decode",): 4,
    ("attention_prefill",): 2,
    ("attention_mixed",): 6,
    ("moe", "moe_fp8"): 3,
    ("gemm", "gemm_fp8"): 3,
    ("routing", "sampling", "norm", "rope", "kv_append"): 3,
}
"""Operators that share a process, and their shares of the time."""
NAMES = [operator for family in FAMILIES for operator in family]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m baselines.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="the model, dtype and page size of this YAML file")
    parser.add_argument("--set", metavar="SECTION.KEY=VALUE", action="append", default=[], help="override a value; may be repeated")
    parser.add_argument("--operators", metavar="NAME,...", default=",".join(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--without", metavar="BACKEND,...", default="", help="leave these out, such as pod, which compiles for minutes")
    parser.add_argument("--json", metavar="FILE", type=Path, help="where each result goes as it comes, a line of JSON")
    parser.add_argument("--resume", action="store_true", help="keep what FILE has, and run the rest")
    parser.add_argument("--budget-s", metavar="N", type=float, default=300.0, help="time for all, without compilations (%(default).0f)")
    parser.add_argument("--hang-s", metavar="N", type=float, default=240.0, help="end a family silent for so long (%(default).0f)")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="show what an earlier run found, and run nothing")
    parser.add_argument("--images", metavar="DIR", type=Path, help="with --plot: draw kernels-OPERATOR.png there")
    arguments = parser.parse_args()
    try:
        show(arguments.plot, arguments.images) if arguments.plot else run(parser, arguments)
    except (ConfigError, ValueError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    wanted, without = arguments.operators.split(","), arguments.without.split(",")
    if unknown := set(wanted) - set(NAMES):
        parser.error(f"--operators: no operator {', '.join(sorted(unknown))}; there are: {', '.join(NAMES)}")
    if arguments.resume and not arguments.json:
        parser.error("--resume: needs --json")
    from baselines.kernels.machine import describe_machine, make_bench
    from baselines.kernels.measure import Job
    from baselines.kernels.supervise import Supervisor

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no family outlives this
    machine = describe_machine(make_bench(arguments.config, arguments.set))
    record = Record(arguments.json, arguments.resume, machine)
    supervisor = Supervisor(record, arguments.hang_s, lambda line: print(line, flush=True))
    families = [(chosen, share) for family, share in FAMILIES.items() if (chosen := [name for name in family if name in wanted])]
    begin, left_s = time.monotonic(), arguments.budget_s
    try:
        for index, (operators, share) in enumerate(families):
            budget_s = left_s * share / sum(share for _, share in families[index:])
            started = time.monotonic()
            job = Job(operators, arguments.config, arguments.set, budget_s, without)
            supervisor.run(job, last=index + 1 == len(families))
            left_s = max(0.0, left_s - min(budget_s, time.monotonic() - started))
    finally:
        supervisor.close()
    print(f"\n{tables(machine, list(record.results.values()))}\n{time.monotonic() - begin:.0f} s in all", flush=True)


def show(path: Path, images: Path | None) -> None:
    machine, results = read(path)
    print(tables(machine, results))
    if images:
        from baselines.kernels.pictures import draw_all

        for picture in draw_all(machine, results, images):
            print(picture)


if __name__ == "__main__":
    main()
