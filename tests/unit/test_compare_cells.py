"""The grammar of cells, and when a row must not be trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baselines.cells import Cell, Shape, parse_cells
from baselines.load import processes
from baselines.rows import key, keys_of, make_row, read_rows, refusal
from baselines.schedule import Step

SHORT, LONG = Shape(128, 256), Shape(4096, 16)


def summary(**changes: Any) -> dict[str, Any]:
    latency = {"p50": 10.0, "p99": 20.0}
    plain = {
        "requests": {"completed": 9, "failed": 0},
        "errors": {},
        "tokens": {"input": 1000, "cached": 0, "output_per_s": 500.0},
        "ttft_ms": latency,
        "tpot_ms": latency,
        "itl_ms": latency,
        "receive_lag_ms": {"p99": 1.0},
        "client_cpu": {"mean": 0.5, "busiest": 0.6},
    }
    return {**plain, **changes}


def row(target: str = "ours", extra: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    step = Step(target, Cell((SHORT,), 8))
    return make_row(step, SHORT, summary(**changes), facts=extra or {}, expected_distinct=50.0, peak_memory_gib=None)


def test_the_cells_of_a_text() -> None:
    assert parse_cells("128/256@1,8; 4096/16+128/256@8\n128/256~0.8,0.95@32:20") == [
        Cell((SHORT,), 1),
        Cell((SHORT,), 8),
        Cell((LONG, SHORT), 8),
        Cell((SHORT,), 32, 0.8, 0.95, 20.0),
    ]


@pytest.mark.parametrize("text", ["", "128/256", "128/256@", "128/256@0", "4096/16+128/256@3", "1/2+1/2@2", "128/256@1@2", "1/2~0.8@1"])
def test_a_text_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^cells: "):
        parse_cells(text)


def test_the_window_grows_with_concurrency() -> None:
    seconds = [Cell((SHORT,), concurrency).measured_s((8, 16)) for concurrency in (1, 16, 256, 1024)]
    assert seconds == [8, 12, 16, 16]
    assert Cell((SHORT,), 1, window_s=20).measured_s((8, 16)) == 20


def test_every_cell_has_prompts_of_its_own() -> None:
    cells = [*parse_cells("128/256@1,8 4096/16@8"), *parse_cells("128/256~0.8,0.95@8")]
    seeds = {cell.seed(base, part) for cell in cells for base in (0, 1) for part in (0, 1)}
    assert len(seeds) == 4 * len(cells)
    assert cells[0].seed(0, 0) == parse_cells("128/256@1:99")[0].seed(0, 0)


def test_every_repeat_has_prompts_of_its_own_and_a_row_of_its_own() -> None:
    (cell,) = parse_cells("128/256@1")
    steps = [Step(target, cell, block, repeat) for target in ("ours", "vllm") for block in (1, 2) for repeat in (0, 1, 2)]
    assert len({cell.seed(0, 0, step.round) for step in steps}) == 6
    assert len(set().union(*map(keys_of, steps))) == 12
    # Results of before there were repeats are of the first.
    old = {"target": "ours", "workload": {"input_tokens": 128, "output_tokens": 256}, "concurrency": 1}
    assert {key(old)} == keys_of(steps[0])
    assert steps[0].round == ""


@pytest.mark.parametrize(("concurrency", "expected"), [(1, 1), (2, 2), (8, 4), (64, 4), (128, 8), (256, 8)])
def test_processes(concurrency: int, expected: int) -> None:
    assert processes(Cell((SHORT,), concurrency), 8) == expected


def test_a_good_row_has_no_objection() -> None:
    assert "invalid" not in row(extra={"distinct_experts": 46.0})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"receive_lag_ms": {"p99": 21.0}}, "the load generator was 21 ms late"),
        ({"extra": {"distinct_experts": 44.0}}, "44.0 distinct experts a layer, but uniform routing has 50.0"),
        ({"tokens": {"input": 1000, "cached": 100, "output_per_s": 1.0}}, "100 of 1000 input tokens came from the prefix cache"),
        ({"requests": {"completed": 0, "failed": 0}}, "no request was completed"),
        ({"ttft_ms": {"p50": None, "p99": None}}, "no request began and ended in the window"),
        ({"errors": {"server": {"count": 2, "example": "X: y"}}}, "2 requests failed (server), such as X: y"),
    ],
)
def test_why_a_row_is_invalid(changes: dict[str, Any], reason: str) -> None:
    (only,) = row(**changes)["invalid"]
    assert only.startswith(reason)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{}", "not a list of cells"),
        ("[5]", "a cell is no object: 5"),
        ('[{}, {"invalid": "late"}]', "invalid: not a list of reasons: 'late'"),
        ('[{"invalid": [1]}]', r"invalid: not a list of reasons: \[1\]"),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    file = tmp_path / "result.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"result.json: {reason}$"):
        read_rows(file)


def test_answers_of_another_length_are_refused() -> None:
    assert refusal(SHORT, summary()) == ""
    other = {"queue_full": {"count": 1, "example": "RESOURCE_EXHAUSTED"}}
    assert refusal(SHORT, summary(errors=other)) == ""
    wrong = {"server": {"count": 3, "example": "PROTOCOL: 17 tokens received, but 256 were asked for"}}
    assert refusal(SHORT, summary(errors=other | wrong)).startswith("answers are not of the 256 tokens asked for: 3 requests, such as")
