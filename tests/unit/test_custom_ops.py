"""What the operators' schemas say of mutation, and their fakes of results, is true of what they do; for the own kernels, interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inference_service.kernels.custom_op import custom_op
from tests.unit.own_kernels import launches

ON_GPU = torch.cuda.is_available()


def import_own() -> None:
    """What registers the operators of the own kernels."""
    from inference_service.kernels import (  # noqa: F401
        triton_fp8,
        triton_gather,
        triton_gemm,
        triton_grouped,
        triton_grouped_routing,
        triton_input_routing,
        triton_kv_append,
        triton_mla,
        triton_mla_append,
        triton_moe,
        triton_paged,
        triton_routing,
        triton_sampling,
        triton_split_gemm,
        triton_tiled,
    )


def check(name: str, arguments: tuple[Any, ...]) -> None:
    """By running the operator on real tensors, and its fake on their shapes. Whether FP8 tensors are mutated PyTorch cannot see."""
    operator = getattr(torch.ops.inference_service, name).default
    fp8 = any(isinstance(argument, torch.Tensor) and argument.dtype == torch.float8_e4m3fn for argument in arguments)
    torch.library.opcheck(operator, arguments, test_utils=("test_faketensor",) if fp8 else ("test_schema", "test_faketensor"))


@pytest.mark.skipif(ON_GPU, reason="tests/gpu runs these kernels on the GPU")
@pytest.mark.usefixtures("loop_bounds")
def test_own_operators_do_what_they_declare() -> None:
    import_own()
    seen = set()
    for name, arguments in launches(torch.device("cpu")):
        if name not in seen:
            check(name, arguments)
        seen.add(name)
    latent = {"route_grouped", "route_input", "mla_attend", "mla_append"}
    fp8 = {"gemv_fp8", "gemm_fp8_split", "moe_gemv_fp8", "moe_grouped_fp8", "moe_tiled_fp8"}
    products = {"gemv", "gemm_split", "moe_gemv", "moe_grouped", "moe_tiled"}
    assert seen == latent | fp8 | products | {"route", "append", "attend", "gather_contexts", "greedy", "draw"}


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def test_eager_calls_do_not_pass_the_dispatcher() -> None:
    @custom_op(lambda x: torch.empty_like(x))
    def doubled_for_a_test(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    with Dispatched() as dispatched:
        assert torch.equal(doubled_for_a_test(torch.ones(2)), torch.full((2,), 2.0))
    assert not any("doubled" in name for name in dispatched.names)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled: Any = torch.compile(doubled_for_a_test, fullgraph=True, backend=keep)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert any("doubled_for_a_test" in str(node.target) for node in graphs[0].graph.nodes)


def test_an_undeclared_mutation_is_found() -> None:
    @custom_op(lambda x: None)
    def zeroed_for_a_test(x: torch.Tensor) -> None:
        x.zero_()

    with pytest.raises(Exception, match="mutated"):
        check("zeroed_for_a_test", (torch.ones(2),))
