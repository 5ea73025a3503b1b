"""Routing by groups, and Llama 4's: the references against their definition, and the own kernels against the references."""

from __future__ import annotations

import pytest
import torch

from inference_service.kernels.grouped_routing import GroupedSpec, TorchGroupedRouting, TritonGroupedRouting
from inference_service.kernels.input_routing import TorchInputRouting, TritonInputRouting

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these kernels on the GPU")
SPECS = {
    "deepseek-v3": GroupedSpec(256, 8, 8, 4, True, True, 2.5),
    "moonlight": GroupedSpec(64, 6, 1, 1, True, True, 2.446),
    "deepseek-v2": GroupedSpec(160, 6, 8, 3, False, False, 16.0),
    "deepseek-v2-lite": GroupedSpec(64, 6, 1, 1, False, False, 1.0),
    "odd": GroupedSpec(15, 2, 3, 2, True, False, 1.0),
    "every group": GroupedSpec(12, 5, 3, 3, False, True, 1.0),
}


def inputs(spec: GroupedSpec, tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, spec.experts, generator=generator) * 2
    return logits, torch.randn(spec.experts, generator=generator) if spec.sigmoid else None


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_reference_chooses_groups_then_experts(spec: GroupedSpec) -> None:
    logits, bias = inputs(spec)
    ids, weights = TorchGroupedRouting()(logits, bias, spec)
    members = spec.experts // spec.groups
    for token, logit in enumerate(logits.tolist()):
        mass = torch.tensor(logit).exp()
        scores = (mass / (1 + mass) if spec.sigmoid else mass / mass.sum()).tolist()
        choice = [score + (float(bias[expert]) if bias is not None else 0.0) for expert, score in enumerate(scores)]
        groups = [sorted(choice[group * members : (group + 1) * members])[::-1] for group in range(spec.groups)]
        worth = {group: sum(best[: 2 if spec.sigmoid else 1]) for group, best in enumerate(groups)}
        kept = sorted(worth, key=worth.__getitem__)[::-1][: spec.top_groups]
        best = sorted((expert for expert in range(spec.experts) if expert // members in kept), key=choice.__getitem__)[::-1][: spec.top_k]
        chosen = [scores[expert] for expert in best]
        scale = spec.scale / (sum(chosen) if spec.renormalize else 1)
        assert ids[token].tolist() == best
        torch.testing.assert_close(weights[token], torch.tensor([score * scale for score in chosen]))


@interpreted
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_the_own_kernel_chooses_as_the_reference(spec: GroupedSpec, tokens: int) -> None:
    pytest.importorskip("triton")
    logits, bias = inputs(spec, tokens)
    wider = torch.cat((logits, torch.full((tokens, 1), 99.0)), dim=1)[:, :-1]
    ids, weights = TritonGroupedRouting()(wider, bias, spec)
    expected_ids, expected = TorchGroupedRouting()(logits, bias, spec)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected)


@interpreted
def test_nan_leads_to_no_expert_that_does_not_exist() -> None:
    pytest.importorskip("triton")
    for spec in SPECS.values():
        logits, bias = inputs(spec, 2)
        logits[0] = float("nan")
        ids, _ = TritonGroupedRouting()(logits, bias, spec)
        assert ((ids >= 0) & (ids < spec.experts)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_llama_4_scales_inputs(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, x = torch.randn(5, 12, generator=generator), torch.randn(5, 33, generator=generator).to(dtype)
    ids, y = TorchInputRouting()(logits, x)
    assert (ids.dtype, y.dtype, ids[:, 0].tolist()) == (torch.int32, dtype, logits.argmax(-1).tolist())
    for token in range(5):
        torch.testing.assert_close(y[token], (x[token].float() / (1 + (-logits[token].max()).exp())).to(dtype))


@interpreted
@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(0, 16, 64), (1, 16, 5120), (5, 12, 33), (3, 128, 3000)])
def test_the_own_kernel_scales_inputs_as_the_reference(tokens: int, experts: int, hidden: int) -> None:
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(0)
    logits, x = torch.randn(tokens, experts, generator=generator), torch.randn(tokens, hidden + 1, generator=generator)[:, :-1]
    for ours, expected in zip(TritonInputRouting()(logits, x), TorchInputRouting()(logits, x), strict=True):
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected)
