"""Schedules, means and ratios with their intervals, and what is made of them."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baselines.cells import Row, parse_cells
from baselines.compare import Comparison
from baselines.estimates import mean_of, paired_ratio, ratio
from baselines.page import page, ratio_chart
from baselines.report import INTERVALS, table_lines
from baselines.rows import failed_row, make_row
from baselines.schedule import BLOCKS, INTERLEAVED, Step, blocks, interleaved, is_interleaved
from baselines.summary import summarize
from inference_service.config import load_config
from tests.unit.test_compare_cells import summary

ONE, TWO = parse_cells("8/4@1,2")


def made(step: Step, tokens_per_s: float, ttft_ms: float = 10.0, **facts: Any) -> Row:
    (shape,) = step.cell.shapes
    measured = summary(tokens={"input": 9, "cached": 0, "output_per_s": tokens_per_s}, ttft_ms={"p50": ttft_ms, "p99": ttft_ms})
    return make_row(step, shape, measured, facts=facts, expected_distinct=None, peak_memory_gib=1.0)


def test_interleaved_goes_around_the_targets_in_each_cell() -> None:
    steps = interleaved(["a", "b", "c"], [ONE, TWO], 2)
    assert [step.target for step in steps] == [*"abc", *"abc", *"cba", *"cba"]
    assert [step.cell.concurrency for step in steps] == [1, 1, 1, 2, 2, 2] * 2
    assert {step.schedule for step in steps} == {INTERLEAVED}
    assert {step.block for step in steps} == {1}


def test_blocks_are_a_b_a_and_have_their_repeats_within() -> None:
    steps = blocks(["a", "b"], [ONE, TWO], 2)
    assert [(step.target, step.block, step.repeat, step.cell.concurrency) for step in steps] == [
        (target, block, repeat, users) for target, block in (("a", 1), ("b", 1), ("a", 2)) for repeat in (0, 1) for users in (1, 2)
    ]
    assert {(step.target, step.block) for step in blocks(["a"], [ONE], 3)} == {("a", 1)}


@pytest.mark.parametrize(
    ("overrides", "targets", "together"),
    [
        (["comparison.interleave=true"], 2, True),
        (["comparison.interleave=false", "device.kind=cpu"], 2, False),
        (["device.kind=cuda"], 2, False),
        (["device.kind=cuda", "cache.gpu_memory_fraction=0.45"], 2, True),
        (["device.kind=cuda", "cache.gpu_memory_fraction=0.45"], 3, False),
        (["device.kind=cpu", "cache.memory_gib=0.1"], 1, False),
        (["device.kind=cpu", "cache.memory_gib=100000"], 2, False),
    ],
)
def test_servers_are_up_at_once_where_their_memory_allows_it(overrides: list[str], targets: int, together: bool) -> None:
    found, why = is_interleaved(load_config(None, overrides), ["a", "b", "c"][:targets], None)
    assert found == together
    assert why


def test_the_interval_of_a_mean() -> None:
    """t(2) = 4.303 for three samples: 2 +- 4.303 / sqrt(3)."""
    found = mean_of([1.0, 2.0, 3.0])
    assert found.low is not None and found.high is not None
    assert (found.value, found.samples) == (2.0, 3)
    assert found.high - 2 == pytest.approx(2 - found.low) == pytest.approx(4.303 / math.sqrt(3))
    assert (mean_of([5.0]).low, mean_of([5.0]).samples) == (None, 1)


def test_the_interval_of_a_ratio_side_by_side_cancels_what_slows_both() -> None:
    found = paired_ratio([(10.0, 20.0), (100.0, 200.0), (1.0, 2.0)])
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))
    # The logarithms of the ratios are 0, 1 and 2.
    found = paired_ratio([(1.0, 1.0), (math.e, 1.0), (math.e**2, 1.0)])
    assert (found.value, found.low, found.high) == pytest.approx([math.exp(1 + side * 4.303 / math.sqrt(3)) for side in (0, -1, 1)])


def test_the_interval_of_a_ratio_of_measurements_apart_is_welchs() -> None:
    """Logarithms 1, 2, 3 and 0, 0.5, 1: variances 1 and 1/4, so the error is sqrt(5/12) with (5/12)^2 / (1/18 + 1/288) = 2.94 degrees of
    freedom, rounded down to 2."""
    found = ratio([math.exp(x) for x in (1, 2, 3)], [math.exp(x) for x in (0, 0.5, 1)])
    half = 4.303 * math.sqrt(5 / 12)
    assert (found.value, found.low, found.high) == pytest.approx([math.exp(1.5 + side * half) for side in (0, -1, 1)])
    # As large groups as these of equal variance have 2 * (3 - 1) degrees of freedom.
    same = ratio([math.exp(x) for x in (1, 2, 3)], [math.exp(x) for x in (0, 1, 2)])
    assert same.high == pytest.approx(math.exp(1 + 2.776 * math.sqrt(2 / 3)))
    assert (ratio([2.0], [1.0, 1.0]).value, ratio([2.0], [1.0, 1.0]).low) == (2.0, None)


def test_every_ratio_and_its_interval_of_a_b_a() -> None:
    steps = blocks(["a", "b"], [ONE], 2)
    speeds = {("a", 1): 10.0, ("a", 2): 11.0, ("b", 1): 20.0}
    rows = [made(step, speeds[step.target, step.block] * (1 + 0.1 * step.repeat), start_s=float(step.block)) for step in steps]
    found = summarize(rows, ["a", "b"])
    (cell,) = found.cells
    assert list(cell.ratios) == ["a / b", "a again / a"]
    assert cell.ratios["a / b"]["tokens/s"].value == pytest.approx(math.sqrt(110) / 20)
    assert cell.ratios["a again / a"]["tokens/s"].value == pytest.approx(1.1)
    assert cell.figures["a"]["tokens/s"].samples == 4
    # A start is one sample, however many repeats share it.
    assert (cell.figures["a"]["start s"].value, cell.figures["a"]["start s"].samples) == (1.5, 2)
    assert found.how.startswith("In blocks on one device, one server at a time: a, b, a (again).")
    assert json.loads(json.dumps(found.as_json()))["cells"][0]["ratios"]["a / b"]["tokens/s"]["low"] < 0.6


def test_interleaved_ratios_are_of_pairs() -> None:
    steps = interleaved(["a", "b"], [ONE], 3)
    rows = [made(step, (1.0 if step.target == "a" else 2.0) * 10**step.repeat) for step in steps]
    (cell,) = summarize(rows, ["a", "b"]).cells
    found = cell.ratios["a / b"]["tokens/s"]
    assert (found.low, found.high) == pytest.approx((0.5, 0.5))
    assert found.samples == 3
    assert summarize(rows, ["a", "b"]).how.startswith("Interleaved")


def test_a_refused_cell_has_a_row_and_no_ratio() -> None:
    good, bad = Step("a", ONE), Step("b", ONE)
    rows = [made(good, 10.0), failed_row(bad, ONE.shapes[0], "answers are not of the 4 tokens asked for")]
    header, *lines = table_lines(summarize(rows, ["a", "b"]))
    assert [line[2] for line in lines] == ["a", "b"]
    assert dict(zip(header, lines[1], strict=True))["note"] == "INVALID: answers are not of the 4 tokens asked for"


def test_an_invalid_row_counts_for_nothing_beside_valid_ones() -> None:
    steps = interleaved(["a", "b"], [ONE], 3)
    rows = [made(step, 10.0) for step in steps]
    rows[1] |= {"output_tokens_per_s": 1000.0, "invalid": ["the load generator was 21 ms late"]}
    (cell,) = summarize(rows, ["a", "b"]).cells
    assert (cell.figures["b"]["tokens/s"].value, cell.figures["b"]["tokens/s"].samples) == (10.0, 2)
    assert (cell.ratios["a / b"]["tokens/s"].value, cell.ratios["a / b"]["tokens/s"].samples) == (1.0, 2)
    assert cell.objections == {"b": ["1.1: the load generator was 21 ms late"]}
    for row in rows:
        if row["target"] == "b":
            row["invalid"] = ["the load generator was 21 ms late"]
    (cell,) = summarize(rows, ["a", "b"]).cells
    assert cell.ratios == {} and cell.figures["b"]["tokens/s"].samples == 3


def test_a_failed_row_hides_no_invalid_ones_and_leaves_no_ratio() -> None:
    steps = [Step(target, ONE, repeat=repeat) for target in "ab" for repeat in (0, 1, 2)]
    rows = [made(step, 10.0) for step in steps]
    rows[3] = failed_row(steps[3], ONE.shapes[0], "died")
    (cell,) = summarize(rows, ["a", "b"]).cells
    assert cell.ratios == {} and cell.figures["b"]["tokens/s"].samples == 2
    for row in rows[4:]:
        row["invalid"] = ["late"]
    (cell,) = summarize(rows, ["a", "b"]).cells
    assert cell.ratios == {} and cell.figures["b"]["tokens/s"].samples == 2


def test_what_is_resumed(tmp_path: Path) -> None:
    """What is missing, then what failed; what is invalid with all that stands beside it, where servers are side by side."""
    comparison = Comparison(load_config(None, []), tmp_path)
    for make, expected in ((interleaved, [0, 1, 3, 6, 7]), (blocks, [8, 9, 10, 11, 1, 3, 6])):
        steps = make(["a", "b"], [ONE, TWO], 2)
        comparison.rows = [made(step, 10.0) for step in steps[:8]]
        comparison.rows[1]["invalid"] = ["late"]
        comparison.rows[3] = failed_row(steps[3], TWO.shapes[0], "died")
        comparison.rows[6]["invalid"] = ["late"]
        assert [steps.index(step) for step in comparison._unmeasured(steps)] == expected


def test_a_round_that_is_measured_anew_in_part_is_missing_for_the_rest(tmp_path: Path) -> None:
    """A new row makes no pair with an old one."""
    comparison = Comparison(load_config(None, []), tmp_path)
    steps = interleaved(["a", "b", "c"], [ONE, TWO], 2)
    comparison.rows = [made(step, 10.0) for step in steps]
    comparison.rows[1]["invalid"] = ["late"]
    apart = made(Step("d", ONE), 10.0)
    comparison.rows.append(apart)
    first, second, third = comparison._unmeasured(steps)
    assert [first, second, third] == steps[:3]
    comparison._add([made(first, 20.0)])
    comparison._add([made(second, 20.0) | {"invalid": ["late"]}])
    resumed = Comparison(load_config(None, []), tmp_path)
    assert [row["target"] for row in resumed.rows] == [*"abc", *"cba", *"cba", "d", *"ab"]
    assert apart in resumed.rows and len(resumed.wanted(steps[:3])) == 2
    # What has no row comes first, though its round is measured anew once more; then the rest of the round is gone again.
    assert resumed._unmeasured(steps) == [third, first, second]
    resumed._add([made(third, 30.0)])
    assert [row["target"] for row in resumed.wanted(steps[:3])] == ["c"]
    resumed._add([made(first, 30.0)])
    resumed._add([made(second, 30.0)])
    assert resumed._unmeasured(steps) == []
    assert {row["output_tokens_per_s"] for row in resumed.wanted(steps[:3])} == {30.0}


@pytest.mark.parametrize(
    ("content", "experts"),
    [
        ('{"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128, "num_experts_per_tok": 8}', (128, 8)),
        ('{"architectures": ["NewForCausalLM"], "n_routed_experts": 64, "num_experts_per_tok": 6}', (64, 6)),
        ('{"num_experts": null, "num_local_experts": 8, "num_experts_per_tok": 2}', (8, 2)),
        ('{"architectures": ["LlamaForCausalLM"]}', (0, 0)),
        ('{"architectures": 5, "num_experts": "many", "num_experts_per_tok": 8}', (0, 0)),
        ('{"num_experts": 4, "num_experts_per_tok": 8}', (0, 0)),
        ("[]", (0, 0)),
        ("{", (0, 0)),
    ],
)
def test_the_experts_of_any_config_json(tmp_path: Path, content: str, experts: tuple[int, int]) -> None:
    (tmp_path / "config.json").write_text(content)
    assert Comparison(load_config(None, [f"model.path={tmp_path}"]), tmp_path)._experts == experts


def test_comparing_needs_no_torch() -> None:
    code = "import sys, baselines.compare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ratios_are_of_the_first_target_to_the_others() -> None:
    rows = [made(Step("vllm", ONE), 500.0, ttft_ms=20.0), made(Step("ours", ONE), 500.0)]
    header, *lines = table_lines(summarize(rows, ["ours", "vllm"]))
    assert [line[2] for line in lines] == ["ours", "vllm", "ours / vllm"]
    ratios = dict(zip(header, lines[2], strict=True))
    assert (ratios["TTFT p50 ms"], ratios["tokens/s"], ratios["start s"]) == ("x 0.50", "x 1.00", "")


def test_the_page_has_each_ratio_the_notes_and_the_order() -> None:
    steps = interleaved(["a", "b"], [ONE, TWO], 2)
    rows = [made(step, 10.0 + step.repeat, notes=["<an orientation>"] if step.target == "b" else []) for step in steps]
    found = summarize(rows, ["a", "b"])
    text = page(found, table_lines(found), INTERVALS)
    assert "Interleaved: all servers were up at once" in text
    assert "&lt;an orientation&gt;" in text and "<an orientation>" not in text
    assert text.count("<tr class=ratio>") == 2
    # Five figures, with a dot and a bar for each of two cells.
    assert len(re.findall("<circle", text)) == len(re.findall('class="bar"', text)) == 10
    assert ratio_chart(summarize(rows, ["a"]), "tokens/s") == ""


def test_published_results_stay_readable() -> None:
    row = {
        "target": "ours",
        "workload": {"input_tokens": 128, "output_tokens": 64},
        "concurrency": 1,
        "ttft_ms": {"p50": 10.5, "p99": 11.1},
        "tpot_ms": {"p50": 2.1},
        "itl_ms": {"p99": 2.6},
        "output_tokens_per_s": 428.3,
        "peak_memory_gib": 124.8,
        "start_s": 14.4,
    }
    (cell,) = summarize([row, {**row, "target": "vllm", "output_tokens_per_s": 364.2}], ["ours", "vllm"]).cells
    assert cell.ratios["ours / vllm"]["tokens/s"].value == pytest.approx(428.3 / 364.2)
    assert BLOCKS in summarize([row], ["ours"]).how
