"""Decode speed on a CPU: transformers.generate against our executor with one stream, and our executor with one stream against many.

    python benchmarks/cpu_decode.py --threads 2 [--model DIR] [--streams 1 16] [--tokens 96]

The contestants take turns, each in a fresh process (two OpenMP pools in one would disturb each other), and each one's best round counts,
so that other work on the machine disturbs all alike. Without --model, SmolLM2-135M's shape with random weights is used: the speed does
not depend on their values.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from inference_service.config import Config, load_config
from inference_service.engine.step import Executor, Row, StepPlan
from inference_service.execution.executor import build_executor
from inference_service.messages import Sampling

SHAPE = Path(__file__).parents[1] / "configs" / "models" / "smollm2-135m"
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory with weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens a stream")
    parser.add_argument("--tokens", type=int, default=96, help="tokens decoded a stream")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    contestants: dict[str, Callable[[], float]] = {
        "transformers.generate, 1 stream": partial(_run_reference, args),
        **{f"executor, {count} stream(s)": partial(_run_executor, args, count) for count in args.streams},
    }
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
        for _ in range(args.rounds):
            for name, run in contestants.items():
                rates[name].append(processes.submit(run).result())
    _print_table({name: max(values) for name, values in rates.items()}, args.streams)


def _run_reference(args: argparse.Namespace) -> float:
    torch.set_num_threads(args.threads)
    model = _load_reference(args)
    return max(_generate(model, args.prompt, args.tokens) for _ in range(2))


def _run_executor(args: argparse.Namespace, streams: int) -> float:
    executor = build_executor(_config(args), args.model or SHAPE, lambda line: None)
    best = max(_decode(executor, streams, args.prompt, args.tokens) for _ in range(2))
    executor.close()
    return best


def _config(args: argparse.Namespace) -> Config:
    form = "auto" if args.model else "dummy"
    overrides = [f"model.load_format={form}", f"model.dtype={args.dtype}", f"device.threads={args.threads}", "device.kind=cpu"]
    pages = max(args.streams) * -(-(args.prompt + args.tokens + 1) // 16)
    return load_config(None, [*overrides, f"cache.pages={pages}", f"batch.max_step_tokens={max(args.streams) * args.prompt}"])


def _load_reference(args: argparse.Namespace) -> Any:
    import transformers

    models: Any = transformers.AutoModelForCausalLM
    dtype = getattr(torch, args.dtype)
    if args.model:
        return models.from_pretrained(args.model, dtype=dtype).eval()
    return models.from_config(transformers.AutoConfig.from_pretrained(SHAPE), dtype=dtype).eval()


def _generate(model: Any, prompt: int, tokens: int) -> float:
    """Tokens a second of transformers.generate after its first token (by the difference of a long and a one-token call)."""

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        ids = torch.arange(1000, 1000 + prompt).unsqueeze(0)
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=count, max_new_tokens=count, pad_token_id=0)
        return time.perf_counter() - begin

    return tokens / (seconds(tokens + 1) - seconds(1))


def _decode(executor: Executor, streams: int, prompt: int, tokens: int) -> float:
    """Tokens a second of all streams together after the first token, with each step launched while the one before runs."""
    per_stream = -(-(prompt + tokens + 1) // 16)
    pages = [list(range(stream * per_stream, (stream + 1) * per_stream)) for stream in range(streams)]
    ids = list(range(1000, 1000 + prompt))
    prefill = StepPlan([Row(slot, 0, prompt, ids, pages[slot], True, GREEDY) for slot in range(streams)])
    executor.launch(prefill).wait()
    begin = time.perf_counter()
    running = None
    for position in range(prompt, prompt + tokens):
        launched = executor.launch(StepPlan([Row(slot, position, 1, [], pages[slot], True, GREEDY) for slot in range(streams)]))
        if running:
            running.wait()
        running = launched
    if running:
        running.wait()
    return streams * tokens / (time.perf_counter() - begin)


def _print_table(rates: dict[str, float], streams: list[int]) -> None:
    names = list(rates)
    print(f"\n{'':34}{'tokens/s':>10}{'ms a step':>11}{'ratio':>8}  to")
    for name, count, base in zip(names, [1, *streams], [names[0], names[0], *[names[1]] * (len(streams) - 1)], strict=True):
        print(f"{name:34}{rates[name]:10.1f}{1000 * count / rates[name]:11.2f}{rates[name] / rates[base]:8.2f}  {base}")


if __name__ == "__main__":
    main()
