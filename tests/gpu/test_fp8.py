"""Products with weights in FP8 on the GPU against float32 on the dequantized weights, and a served model of each form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from inference_service.config import load_config
from inference_service.engine.step import Row, StepPlan
from inference_service.execution.cuda_executor import CudaExecutor
from inference_service.execution.executor import build_executor
from inference_service.kernels import support
from inference_service.kernels.flashinfer_fp8 import GEMV_TOKENS
from inference_service.kernels.fp8 import E4M3, BlockFp8, as_bytes, quantize
from inference_service.kernels.routing import TritonRouting
from inference_service.models.fp8 import SCALES, in_fp8
from tests.gpu.test_attention import QWEN, make_cache, make_layout, make_query
from tests.gpu.test_attention import reference as attended
from tests.gpu.test_families import GREEDY, LENGTH, SEQUENCES, SETTINGS, Case, all_logits, chunk, pages
from tests.gpu.tiny import reference_logits, save_tiny
from tests.unit.test_fp8_kernels import rounded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")

ROUNDED, EXACT = 4e-2, 1e-2
"""The largest relative error: where activations are rounded to FP8 (3e-2 is usual), and where they are not."""
PRODUCTS = {"qkv": (5120, 2048), "latents": (3648, 2048), "down": (2048, 11008), "small": (128, 256)}
EXPERTS = {"qwen3-30b-a3b": (128, 768, 2048, 8), "moonlight": (64, 1408, 2048, 6)}


def backend(operator: str, name: str) -> Any:
    return next(row for row in support.rows(operator) if row.backend == name).make()


def random_fp8(*shape: int) -> BlockFp8:
    torch.manual_seed(0)
    matrices = [quantize(torch.randn(shape[-2:], device="cuda") * 0.05) for _ in range(shape[0] if len(shape) == 3 else 1)]
    if len(shape) == 2:
        return matrices[0]
    values = torch.stack([as_bytes(matrix.values) for matrix in matrices]).view(E4M3)
    return BlockFp8(values, torch.stack([matrix.scales for matrix in matrices]))


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


def allowed(name: str, tokens: int) -> float:
    return EXACT if name.startswith("triton") and tokens <= GEMV_TOKENS else ROUNDED


@pytest.mark.parametrize("name", ["triton", "deepgemm", "triton+deepgemm"])
@pytest.mark.parametrize("shape", PRODUCTS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 9, 32, 33, 100, 1111])
def test_product(name: str, shape: str, tokens: int) -> None:
    gemm, matrix = backend("gemm_fp8", name), random_fp8(*PRODUCTS[shape])
    x = torch.randn(tokens, PRODUCTS[shape][1], device="cuda", dtype=torch.bfloat16)
    torch.full((tokens, PRODUCTS[shape][0]), float("nan"), device="cuda", dtype=torch.bfloat16)
    y, expected = gemm(x, matrix), F.linear(x.float(), matrix.dequantize(torch.float32))
    print(f"{name} {shape} {tokens}: relative error {error(y, expected):.2e}")
    assert y.dtype == x.dtype and error(y, expected) < allowed(name, tokens)


def reference(x: Tensor, gate_up: BlockFp8, down: BlockFp8, ids: Tensor, scales: Tensor) -> Tensor:
    y = torch.zeros(x.shape, device="cuda")
    for expert in sorted(set(ids.flatten().tolist())):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        up_gate, last = (BlockFp8(each.values[expert], each.scales[expert]).dequantize(torch.float32) for each in (gate_up, down))
        up, gate = (x[tokens].float() @ up_gate.T).chunk(2, dim=-1)
        y.index_add_(0, tokens, (F.silu(gate) * up) @ last.T * scales[tokens, slots].unsqueeze(1))
    return y


@pytest.mark.parametrize("name", ["triton", "cutlass"])
@pytest.mark.parametrize("shape", EXPERTS)
def test_experts(name: str, shape: str) -> None:
    moe, (experts, size, hidden, top_k) = backend("moe_fp8", name), EXPERTS[shape]
    gate_up, down = random_fp8(experts, 2 * size, hidden), random_fp8(experts, hidden, size)
    for tokens in (1, 2, 3, 9, 33, 64, 128, 171, 1111, 2500):
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        ids, scales = TritonRouting()(torch.randn(tokens, experts, device="cuda"), top_k, True)
        torch.full(x.shape, float("nan"), device="cuda", dtype=torch.bfloat16)
        y, expected = moe(x, gate_up, down, ids, scales), reference(x, gate_up, down, ids, scales)
        print(f"{name} {shape} {tokens}: relative error {error(y, expected):.2e}")
        assert y.dtype == x.dtype and error(y, expected) < 1.5 * allowed(name, tokens), tokens


@pytest.mark.parametrize("name", ["triton", "cutlass"])
@pytest.mark.parametrize("tokens", [4, 40])
def test_in_a_cuda_graph(name: str, tokens: int) -> None:
    moe, gemm = backend("moe_fp8", name), backend("gemm_fp8", "triton+deepgemm")
    gate_up, down, matrix = random_fp8(16, 512, 512), random_fp8(16, 512, 256), random_fp8(512, 512)
    x, logits = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16), torch.randn(tokens, 16, device="cuda")

    def step() -> Tensor:
        y: Tensor = moe(gemm(x, matrix), gate_up, down, *TritonRouting()(logits, 4, True))
        return y

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = step()
        for _ in range(3):
            x.normal_()
            logits.normal_()
            y.fill_(float("nan"))
            graph.replay()
            hidden = F.linear(x.float(), matrix.dequantize(torch.float32))
            assert error(y, reference(hidden, gate_up, down, *TritonRouting()(logits, 4, True))) < 2 * ROUNDED


def save_fp8(family: str, model_dir: Path) -> None:
    """A checkpoint as published, and beside it, in `plain`, what its weights mean."""
    save_tiny(family, model_dir)
    tensors = load_file(model_dir / "model.safetensors", device="cuda")
    meant = {}
    for name in [name for name in tensors if in_fp8(name)]:
        matrix = quantize(tensors[name])
        tensors |= {name: matrix.values, name + SCALES: matrix.scales}
        meant[name] = matrix.dequantize(torch.float32)
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "plain").mkdir()
    (model_dir / "plain" / "config.json").write_text(json.dumps(config))
    plain = {name: tensor.float() for name, tensor in (tensors | meant).items() if not name.endswith(SCALES)}
    save_file(plain, model_dir / "plain" / "model.safetensors", {"format": "pt"})
    save_file(tensors, model_dir / "model.safetensors")
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (model_dir / "config.json").write_text(json.dumps(config | {"quantization_config": method}))


OWN = ["kernels.gemm_fp8=triton", "kernels.moe_fp8=triton"]
FAMILIES: dict[str, list[str]] = {"qwen3-moe": [], "moonlight": OWN, "deepseek-v3": OWN, "llama": OWN}
"""With settings, since DeepGEMM compiles some dozens of kernels for each shape, each in seconds."""


def rounding_logits(model_dir: Path, ids_BT: Tensor) -> Tensor:
    """As `reference_logits` in float32, with activations rounded wherever they meet a matrix that is in FP8."""
    models: Any = transformers.AutoModelForCausalLM
    options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    model = models.from_pretrained(model_dir, **options).to(ids_BT.device).eval()
    named = model.named_parameters()
    matrices = {weight.untyped_storage().data_ptr() for name, weight in named if in_fp8(name.removesuffix(".weight") + ".weight")}
    linear = F.linear

    def rounding(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(rounded(x) if weight.untyped_storage().data_ptr() in matrices else x, weight, bias)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(F, "linear", rounding)
        logits_BTV: Tensor = model(ids_BT).logits
    return logits_BTV


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    model_dir = tmp_path_factory.mktemp(request.param)
    save_fp8(request.param, model_dir)
    ids_BT = torch.randint(0, 1000, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = reference_logits(model_dir / "plain", ids_BT.cuda(), torch.float32)
    executor = build_executor(load_config(None, SETTINGS + FAMILIES[request.param]), model_dir, print)
    assert isinstance(executor, CudaExecutor)
    yield Case(executor, ids_BT, expected, rounding_logits(model_dir / "plain", ids_BT.cuda()))
    executor.close()


def test_prefill(case: Case) -> None:
    logits = all_logits(case.executor, [chunk(case, slot, 0, LENGTH) for slot in range(SEQUENCES)]).view(SEQUENCES, LENGTH, -1)
    relative = error(logits, case.expected_BTV)
    same = float((logits.argmax(-1) == case.expected_BTV.argmax(-1)).float().mean())
    print(f"relative error {relative:.2e}, top-1 agreement {same:.4f}, with activations rounded to FP8")
    assert relative < 0.15 and same > 0.95


@pytest.mark.parametrize("batch", [1, 8])
def test_decodes_from_graphs(case: Case, batch: int) -> None:
    """Teacher-forced. Of one row activations are not rounded; where they are, the reference rounds them too."""
    executor, first, last = case.executor, 5, 69
    executor.launch(StepPlan([chunk(case, slot, 0, first) for slot in range(batch)])).wait()
    drawn = []
    for position in range(first, last):
        with executor._on_stream():
            executor._runner.last_token_id_S[:batch].copy_(case.ids_BT[:batch, position])
        rows = [Row(slot, position, 1, [], pages(slot), True, GREEDY) for slot in range(batch)]
        assert executor._graphs.sizes(executor._slots.measure(rows)) is not None
        drawn.append(executor.launch(StepPlan(rows)).wait().token_ids)
    expected_BTV = case.expected_BTV if batch <= GEMV_TOKENS else case.rounded_BTV
    best = expected_BTV[:batch, first:last].argmax(-1).cpu()
    same = float((best == torch.tensor(drawn).T).float().mean())
    print(f"top-1 agreement {same:.4f}")
    assert same > 0.95


def test_quantization_at_load(tmp_path: Path) -> None:
    """Gives what the same weights, quantized in the checkpoint, give; and the kernels of FP8 run."""
    save_tiny("qwen3-moe", tmp_path)
    (tmp_path / "published").mkdir()
    save_fp8("qwen3-moe", tmp_path / "published")
    ids = torch.randint(0, 1000, (1, 200), generator=torch.Generator().manual_seed(1))
    found = []
    for model_dir, settings in ((tmp_path, ["model.quantization=fp8"]), (tmp_path / "published", [])):
        executor = build_executor(load_config(None, SETTINGS + settings), model_dir, print)
        assert isinstance(executor, CudaExecutor)
        chosen = {kernel.operator: kernel.backend for kernel in executor.info.kernels}
        assert (chosen["gemm_fp8"], chosen["moe_fp8"]) == ("triton+deepgemm", "triton") and "moe" not in chosen
        row = Row(0, 0, 200, ids[0].tolist(), list(range(4)), True, GREEDY)
        found.append(all_logits(executor, [row]).float())
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            executor.launch(StepPlan([row])).wait()
            executor.launch(StepPlan([Row(0, 200, 1, [], list(range(4)), True, GREEDY)])).wait()
            torch.cuda.synchronize()
        kernels = {event.key for event in profiled.key_averages()}
        assert all(any(part in kernel for kernel in kernels) for part in ("fp8_gemm", "_gemv_fp8", "_gate_up_fp8")), sorted(kernels)
        assert executor.compiles == 0
        executor.close()
    assert error(found[0], found[1]) < 1e-2


SERVED = [("decode", "triton"), ("decode", "xqa"), ("decode", "fa2"), ("prefill", "fa2"), ("mixed", "triton")]


@pytest.mark.parametrize(("operator", "name"), SERVED)
def test_attention_to_a_cache_in_fp8(operator: str, name: str) -> None:
    """The reference attends to the same rounded keys and values."""
    kv = make_cache(QWEN).to(E4M3)
    chunks = {"decode": [], "prefill": [(40, 40), (5, 300), (512, 512)], "mixed": [(40, 40), (5, 300)]}[operator]
    layout = make_layout(QWEN, [] if operator == "prefill" else [1, 63, 64, 65, 1000], chunks)
    q, attention = make_query(layout, QWEN), backend(f"attention_{operator}", name)
    plan, o = attention.plan(layout, kv, QWEN.heads), torch.full_like(q, float("nan"))
    if operator == "mixed":
        o = attention(q, kv, plan)
    else:
        attention(q, kv, plan, o)
    relative = error(o, attended(q, kv, layout))
    print(f"{operator} by {name}: relative error {relative:.2e}")
    # XQA rounds queries and weights too.
    assert o.isfinite().all() and relative < (8e-2 if name == "xqa" else 1e-2)


@pytest.mark.parametrize("settings", [[], ["kernels.attention_decode=xqa"]], ids=["default", "xqa"])
def test_served_with_a_cache_in_fp8(settings: list[str], tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    ids_BT = torch.randint(0, 1000, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
    expected, rounded = (reference_logits(tmp_path, ids_BT.cuda(), dtype) for dtype in (torch.float32, torch.bfloat16))
    executor = build_executor(load_config(None, [*SETTINGS, "cache.dtype=fp8", *settings]), tmp_path, print)
    assert isinstance(executor, CudaExecutor)
    case = Case(executor, ids_BT, expected, rounded)
    logits = all_logits(executor, [chunk(case, slot, 0, LENGTH) for slot in range(SEQUENCES)]).view(SEQUENCES, LENGTH, -1)
    print(f"relative error of the prefill {error(logits, expected):.2e}")
    assert error(logits, expected) < 0.1
    test_decodes_from_graphs(case, 8)
    executor.close()
