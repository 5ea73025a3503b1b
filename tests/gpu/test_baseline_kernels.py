"""Each backend that `baselines.kernels` measures is right on this GPU, at small sizes, and can be timed there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baselines.kernels.case import SMALL
from baselines.kernels.machine import make_bench
from baselines.kernels.measure import OPERATORS, Family, Job, Message
from baselines.kernels.record import Result

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("operator", [operator.name for operator in OPERATORS])
def test_every_backend_is_right_and_timed(operator: str) -> None:
    found: list[Message] = []
    with torch.inference_mode():
        Family(Job([operator], None, [], 600.0), replace(make_bench(None, []), grid=SMALL), found.append).run()
    results = [message for message in found if isinstance(message, Result)]
    assert {result.status for result in results} <= {"measured", "unsupported"}, [
        result for result in results if result.status != "measured"
    ]
    assert any(result.us and result.timed in ("graph", "stream") for result in results)
    assert all(0 < result.us < 1e6 for result in results if result.us is not None)
