"""Speed of the executor on a GPU: its start, decode steps at several batch sizes, prefill, and where a step's time goes.

    python benchmarks/gpu_decode.py --config configs/h200.yaml --out results [--profile] [--host-profile] [--batches 1 8 32]

Writes results.json, with --profile profile-<batch>.txt, and with --host-profile host-profile.txt. Decode steps are launched one
ahead, as the engine does.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from inference_service.config import Config, load_config
from inference_service.engine.step import Executor, Row, StepPlan, Ticket
from inference_service.execution.executor import build_executor
from inference_service.fetch import resolve_model
from inference_service.messages import Sampling

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)
RANDOM = Sampling(0.8, 0, 0.95, 0.0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--host-profile", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "config": args.config, "set": args.set}

    def section(name: str, measure: Callable[[], Any]) -> None:
        """One failure must not hide the other figures."""
        begin = time.perf_counter()
        try:
            results[name] = measure()
        except Exception as error:
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        say(f"{name}: {json.dumps(results[name])} ({time.perf_counter() - begin:.1f} s)")
        (args.out / "results.json").write_text(json.dumps(results, indent=2))

    config = load_config(args.config, args.set)
    begin = time.perf_counter()
    lines: list[str] = []

    def progress(line: str) -> None:
        lines.append(f"{time.perf_counter() - begin:.1f} s: {line}")
        say(lines[-1])

    executor = build_executor(config, resolve_model(config.model.path), progress)
    results["start"] = {"seconds": time.perf_counter() - begin, "lines": lines}
    say(f"started in {results['start']['seconds']:.1f} s")
    bench = Bench(executor, config, args.context, args.steps)

    for batch in args.batches:
        section(f"decode {batch}", lambda batch=batch: bench.decode(batch, GREEDY))  # type: ignore[misc]
    for batch in {1, 32, max(args.batches)} & set(args.batches):
        section(f"decode {batch} sampled", lambda batch=batch: bench.decode(batch, RANDOM))  # type: ignore[misc]
    for tokens in (16, 128, 256, 512, 1024, 2048, 4096):
        section(f"prefill {tokens}", lambda tokens=tokens: bench.prefill(tokens, 1))  # type: ignore[misc]
    section("prefill 8 x 512", lambda: bench.prefill(512, 8))
    section("mixed 2048 + 64", lambda: bench.mixed(2048, 64))
    section("mixed 128 + 64", lambda: bench.mixed(128, 64))
    for tokens in (128, 512):
        section(f"prefill {tokens} eager", lambda tokens=tokens: bench.prefill(tokens, 1, logprobs=0))  # type: ignore[misc]
    if args.host_profile:
        section("host profile of prefill 1024", lambda: bench.host_profile(1024, args.out / "host-profile.txt"))
    if args.profile:
        for batch in (1, 8, 64, 256):
            section(f"profile decode {batch}", lambda batch=batch: bench.profile_decode(batch, args.out))  # type: ignore[misc]
        for tokens in (128, 1024, 4096):
            section(f"profile prefill {tokens}", lambda tokens=tokens: bench.profile_prefill(tokens, args.out))  # type: ignore[misc]
    section("memory", memory)
    executor.close()


def memory() -> dict[str, float]:
    return {"peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30, "free_gib": torch.cuda.mem_get_info()[0] / 2**30}


def say(line: str) -> None:
    print(line, flush=True)


class Bench:
    """Rows of its own making, over pages of its own choosing."""

    def __init__(self, executor: Executor, config: Config, context: int, steps: int) -> None:
        self.executor, self.context, self.steps = executor, context, steps
        self.page_size = config.cache.page_size
        self.rng = random.Random(0)

    def decode(self, batch: int, sampling: Sampling) -> dict[str, float]:
        """Median and mean ms of a step, tokens a second, and host ms of a launch."""
        self._fill(batch)
        launches: list[float] = []
        ends = self._run(batch, sampling, self.steps + 8, launches)[8:]
        steps = sorted(later - earlier for earlier, later in pairwise(ends))
        mean = (ends[-1] - ends[0]) / (len(ends) - 1)
        return {
            "ms": round(1e3 * steps[len(steps) // 2], 3),
            "mean_ms": round(1e3 * mean, 3),
            "tokens_per_s": round(batch / mean, 1),
            "launch_ms": round(1e3 * sorted(launches)[len(launches) // 2], 3),
        }

    def prefill(self, tokens: int, rows: int, logprobs: int = -1) -> dict[str, float]:
        """ms until the first token of a prompt (of several prompts) is on the host. Log-probabilities make the step run eagerly."""
        times, launches = [], []
        for _ in range(6):
            plan = StepPlan([replace(self._prompt(slot, tokens), logprobs=logprobs) for slot in range(rows)])
            begin = time.perf_counter()
            ticket = self.executor.launch(plan)
            launches.append(time.perf_counter() - begin)
            ticket.wait()
            times.append(time.perf_counter() - begin)
        return {"ms": round(1e3 * sorted(times)[len(times) // 2], 2), "launch_ms": round(1e3 * min(launches), 2)}

    def mixed(self, tokens: int, decodes: int) -> dict[str, float]:
        """ms of a step of decodes beside one prefill chunk."""
        self._fill(decodes)
        times = []
        for step in range(6):
            rows = [self._decode_row(slot, step, GREEDY) for slot in range(decodes)]
            begin = time.perf_counter()
            self.executor.launch(StepPlan([*rows, self._prompt(decodes, tokens)])).wait()
            times.append(time.perf_counter() - begin)
        return {"ms": round(1e3 * sorted(times)[len(times) // 2], 2)}

    def host_profile(self, tokens: int, file: Path) -> dict[str, Any]:
        """What the host does in five eager launches: the 40 functions that take longest, those they call included."""
        profiled, plans = cProfile.Profile(), [StepPlan([self._prompt(0, tokens)]) for _ in range(5)]
        for plan in plans:
            profiled.enable()
            ticket = self.executor.launch(plan)
            profiled.disable()
            ticket.wait()
        with file.open("w") as lines:
            pstats.Stats(profiled, stream=lines).sort_stats("cumulative").print_stats(40)
        return {"file": str(file)}

    def profile_decode(self, batch: int, out: Path) -> dict[str, Any]:
        self._fill(batch)
        return self._profile(lambda: self._run(batch, GREEDY, 8, []), 8, out / f"profile-decode-{batch}.txt")

    def profile_prefill(self, tokens: int, out: Path) -> dict[str, Any]:
        def run() -> None:
            self.executor.launch(StepPlan([self._prompt(0, tokens)])).wait()

        return self._profile(run, 1, out / f"profile-prefill-{tokens}.txt")

    def _profile(self, run: Callable[[], Any], steps: int, file: Path) -> dict[str, Any]:
        """The kernels that take most of a step: name, us a step, launches a step."""
        from torch.profiler import ProfilerActivity, profile

        run()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
            run()
            torch.cuda.synchronize()
        kernels = [event for event in profiled.key_averages() if event.device_type.name == "CUDA"]
        kernels.sort(key=lambda event: -event.self_device_time_total)
        rows = [(event.self_device_time_total / steps, event.count / steps, event.key) for event in kernels]
        total = sum(row[0] for row in rows)
        file.write_text("".join(f"{us:10.1f} us {count:7.1f} x  {name}\n" for us, count, name in rows) + f"{total:10.1f} us in all\n")
        for us, count, name in rows[:20]:
            say(f"  {us:9.1f} us {count:6.1f} x  {name[:150]}")
        return {"us_a_step": round(total, 1), "top": [[round(us, 1), round(count, 1), name[:200]] for us, count, name in rows[:30]]}

    def _run(self, batch: int, sampling: Sampling, steps: int, launches: list[float]) -> list[float]:
        """Decode steps, each launched while the one before runs. When each one's ids had arrived."""
        ends: list[float] = []
        running: Ticket | None = None
        for step in range(steps):
            plan = StepPlan([self._decode_row(slot, step, sampling) for slot in range(batch)])
            begin = time.perf_counter()
            launched = self.executor.launch(plan)
            launches.append(time.perf_counter() - begin)
            if running:
                running.wait()
                ends.append(time.perf_counter())
            running = launched
        if running:
            running.wait()
            ends.append(time.perf_counter())
        return ends

    def _fill(self, batch: int) -> None:
        """Prefill every slot with random tokens: routing must not degenerate."""
        budget = 4096 // self.context
        for first in range(0, batch, budget):
            slots = range(first, min(batch, first + budget))
            self.executor.launch(StepPlan([self._prompt(slot, self.context) for slot in slots])).wait()

    def _pages(self, slot: int, tokens: int) -> list[int]:
        each = (self.context + self.steps + 16) // self.page_size + 2
        if tokens <= each * self.page_size:
            return list(range(slot * each, (slot + 1) * each))
        # One long prompt: behind what the slots have.
        first = self.executor.info.pages - -(-tokens // self.page_size) * (1 + slot % 8)
        return list(range(first, first - (-tokens // self.page_size)))

    def _prompt(self, slot: int, tokens: int) -> Row:
        ids = [self.rng.randrange(self.executor.info.vocab_size) for _ in range(tokens)]
        return Row(slot, 0, tokens, ids, self._pages(slot, tokens), True, GREEDY)

    def _decode_row(self, slot: int, step: int, sampling: Sampling) -> Row:
        return Row(slot, self.context + step, 1, [], self._pages(slot, self.context), True, sampling)


if __name__ == "__main__":
    main()
