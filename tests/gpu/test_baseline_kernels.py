"""Each backend that `baselines.kernels` measures is right on this GPU, at small sizes, and can be timed there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from baselines.kernels.machine import describe_machine, make_bench
from baselines.kernels.measure import OPERATORS, Job
from baselines.kernels.record import Record
from baselines.kernels.supervise import Supervisor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

HANG_S = 1800.0
"""POD compiles for minutes, in silence."""


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    """Operators run in processes of their own: a backend that breaks the device ends in a row that names it, and breaks no other test."""
    supervisor = Supervisor(Record(None, False, describe_machine(make_bench(None, []))), HANG_S, print)
    yield supervisor
    supervisor.close()


@pytest.mark.parametrize("operator", [operator.name for operator in OPERATORS])
def test_every_backend_is_right_and_timed(supervisor: Supervisor, operator: str) -> None:
    supervisor.run(Job([operator], None, [], 600.0, small=True), last=operator == OPERATORS[-1].name)
    results = [result for result in supervisor.record.results.values() if result.operator == operator]
    assert {result.status for result in results} <= {"measured", "unsupported"}, [
        result for result in results if result.status not in ("measured", "unsupported")
    ]
    assert any(result.us and result.timed in ("graph", "stream") for result in results)
    # No graph holds what clears POD's counters.
    assert all(result.timed == "stream" for result in results if result.backend == "pod" and result.us is not None)
    assert all(0 < result.us < 1e6 for result in results if result.us is not None)
