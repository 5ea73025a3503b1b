"""How long a layer's attention takes on this GPU: of prompts by each backend, and of prompts beside decodes in each form."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate, product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from inference_service.config import Config
from inference_service.execution.device import find_setting
from inference_service.execution.loading import LoadedModel, Report
from inference_service.execution.memory import cache_dtype
from inference_service.kernels import support
from inference_service.kernels.attention import AttentionSpec, FusedAttention, SplitAttention, StepLayout
from inference_service.kernels.attention_forms import FormTimes, Size, split_name
from inference_service.kernels.expert_tactics import clear_error, microseconds, relative_error
from inference_service.kernels.flashinfer_pod import find_obstacle
from inference_service.kernels.mla import UpProjection, empty_output
from inference_service.kernels.selection import fused_forms, select, split_of

PREFILLS = ([512], [4096], [512] * 8)
"""Prompts of the steps that are timed, in tokens."""
PREFILL_TOKENS, DECODES, CONTEXTS = (512, 2048, 8192), (8, 32, 128), (512, 2048, 8192)
"""Of the steps with both: prefill tokens, decodes, and a decode's context; the prefill tokens are the last of as long a context, or all."""
CALLS = 40
"""How many launches are timed at once: the device sleeps before, and the host keeps ahead of it for so many."""
TIMINGS = 5
MOST_ERROR = 0.02
"""Between the outputs of two forms in half precision, relative: they round differently, and a form that is wrong is far beyond."""

Form = SplitAttention | FusedAttention
Timed = tuple[float, float]
"""Microseconds of the device for a launch, and of the host for a plan."""


def time_prefill(operator: str, config: Config, loaded: LoadedModel, progress: Report) -> dict[str, float]:
    """Microseconds of a layer's attention, summed over PREFILLS, for each backend that runs here."""
    setting = find_setting(config, loaded.target, loaded.shape, loaded.dtype)
    able = [row for row in support.rows(operator) if not row.refusal(setting) and row.backend != "torch"]
    times: dict[str, float] = {}
    for row in able:
        backend = row.make()
        each = [_time_prompts(backend, lengths, config, loaded) for lengths in PREFILLS]
        times[row.backend] = round(sum(each), 1)
        timed = ", ".join(f"{len(lengths)} x {lengths[0]}: {us:.0f} us" for lengths, us in zip(PREFILLS, each, strict=True))
        progress(f"{operator} by {row.backend}: {timed}")
    return times


@torch.inference_mode()
def _time_prompts(backend: Any, lengths: list[int], config: Config, loaded: LoadedModel) -> float:
    """`backend`: an Attention or, for latents, an MlaPrefill."""
    shape, page_size = loaded.shape, config.cache.page_size
    layout, pages = _make_layout(0, lengths, lengths, page_size, loaded.target.device)
    kv_P2HSD = torch.randn(pages, *shape.page_shape(page_size), dtype=loaded.dtype, device=loaded.target.device)
    kv_P2HSD = kv_P2HSD.to(cache_dtype(config, loaded.dtype))
    q_THD = torch.randn(sum(lengths), shape.heads, shape.head_dim, dtype=loaded.dtype, device=loaded.target.device)
    outputs: tuple[Any, ...] = (torch.empty_like(q_THD),)
    if shape.mla:
        sizes = shape.mla.sizes
        up = UpProjection(q_THD.new_empty(shape.heads, sizes.nope + sizes.value, sizes.latent).normal_(0, 0.05), sizes.nope)
        outputs = up, empty_output(q_THD, up)
    run = partial(backend, q_THD, kv_P2HSD, backend.plan(layout, kv_P2HSD, shape.heads, shape.attention), *outputs)
    microseconds(run, 5)
    return microseconds(run, 20)


@torch.inference_mode()
def time_mixed(config: Config, loaded: LoadedModel, fastest: Mapping[str, str], progress: Report) -> list[FormTimes]:
    """Each step of PREFILL_TOKENS x DECODES x CONTEXTS that fits here, timed in all forms; none where split is the only one.

    `fastest`: the backends measured fastest, which make the split form.
    """
    setting, shape = find_setting(config, loaded.target, loaded.shape, loaded.dtype), loaded.shape
    fused = {} if shape.mla else _make_fused(setting, progress)
    if not fused:
        return []
    decode, prefill = split_of(select(config.kernels, setting, fastest))
    forms: dict[str, Form] = {split_name(decode.backend, prefill.backend): SplitAttention(decode.make(), prefill.make()), **fused}
    times = []
    for size in product(PREFILL_TOKENS, DECODES, CONTEXTS):
        each = _time_step(forms, size, config, loaded, progress)
        said = ", ".join(f"{name} {us:.0f} us (plan {plan_us:.0f} us)" for name, (us, plan_us) in each.items())
        progress("{} prefill tokens beside {} decodes of {}: ".format(*size) + (said or "left out, since they would not fit here"))
        if each:
            times.append(FormTimes(size, {name: round(us, 1) for name, (us, _) in each.items()}))
    return [each.without(each.microseconds.keys() - forms) for each in times]


def _time_step(forms: dict[str, Form], size: Size, config: Config, loaded: LoadedModel, progress: Report) -> dict[str, Timed]:
    """By form, as `compare_forms` does it; none where the model or the memory is too small."""
    (tokens, decodes, context), shape, page_size = size, loaded.shape, config.cache.page_size
    lengths, contexts = [1] * decodes + [tokens], [context] * decodes + [max(tokens, context)]
    layout, pages = _make_layout(decodes, lengths, contexts, page_size, loaded.target.device)
    copies = _count_copies(pages * math.prod(shape.page_shape(page_size)) * loaded.dtype.itemsize)
    if max(contexts) > shape.max_context or not copies:
        return {}
    kv_LP2HSD = torch.randn(copies, pages, *shape.page_shape(page_size), dtype=loaded.dtype, device=loaded.target.device)
    q_THD = torch.randn(sum(lengths), shape.heads, shape.head_dim, dtype=loaded.dtype, device=loaded.target.device)
    return compare_forms(forms, layout, lambda form: _time_form(form, layout, kv_LP2HSD, q_THD, shape.attention), progress)


def compare_forms(
    forms: dict[str, Form], layout: StepLayout, time_form: Callable[[Form], tuple[Timed, Tensor]], progress: Report
) -> dict[str, Timed]:
    """The times of split, which is the first, and of each fused form that serves such a step. One that fails, or computes something else
    than split does, is removed from `forms`."""
    (split, first), *fused = forms.items()
    times: dict[str, Timed] = {}
    times[split], expected_THD = time_form(first)
    for name, form in fused:
        if isinstance(form, FusedAttention) and not form.serves(layout):
            continue
        try:
            timed, o_THD = time_form(form)
            error = relative_error(o_THD, expected_THD)
            obstacle = "" if error < MOST_ERROR else f"it is wrong here, by {error:.1%} of what {split} computes"
        except Exception as failure:  # whatever FlashInfer raises for what does not compile or run here
            clear_error()
            obstacle = _describe(failure)
        if obstacle:
            del forms[name]
            progress(f"attention_mixed by {name}: left out: {obstacle}")
        else:
            times[name] = timed
    return times


def _describe(failure: Exception) -> str:
    """In one line, since compilers say much."""
    return f"{type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"


def _make_fused(setting: support.Setting, progress: Report) -> dict[str, FusedAttention]:
    """The forms beside split that can be timed here."""
    made = {}
    for name in fused_forms(setting):
        try:
            obstacle = find_obstacle(name, setting.dtype, setting.head_dim)
            if not obstacle:
                made[name] = next(row for row in support.rows("attention_mixed") if row.backend == name).make()
        except Exception as failure:  # as above
            obstacle = _describe(failure)
        timing = "to be timed; where FlashInfer has not compiled it yet, that takes minutes first"
        progress(f"attention_mixed by {name}: " + (f"left out: {obstacle}" if obstacle else timing))
    return made


def _count_copies(size: int) -> int:
    """How many caches of so many bytes it takes, as the layers of a model have, for twice the L2 cache; 0 where there is no room."""
    torch.cuda.empty_cache()
    copies = -(-2 * torch.cuda.get_device_properties().L2_cache_size // size)
    return copies if copies * size < torch.cuda.mem_get_info()[0] // 2 else 0


def _time_form(form: Form, layout: StepLayout, kv_LP2HSD: Tensor, q_THD: Tensor, spec: AttentionSpec) -> tuple[Timed, Tensor]:
    """Of one form, which reads one cache after another; and what it computes from the last."""
    plan: Any = None
    plans_us = []
    for _ in range(TIMINGS):
        begin = time.perf_counter()
        plan = form.plan(layout, kv_LP2HSD[0], q_THD.shape[1], spec)
        plans_us.append(1e6 * (time.perf_counter() - begin))

    def run() -> None:
        for kv_P2HSD in kv_LP2HSD:
            form(q_THD, kv_P2HSD, plan)

    run()
    repeats = max(1, CALLS // len(kv_LP2HSD))
    us = median(microseconds(run, repeats) for _ in range(TIMINGS)) / len(kv_LP2HSD)
    return (us, median(plans_us)), form(q_THD, kv_LP2HSD[-1], plan)


def _make_layout(decodes: int, lengths: list[int], contexts: list[int], page_size: int, device: torch.device) -> tuple[StepLayout, int]:
    """A step of such rows, each on pages of its own; and how many pages there are."""
    counts = [-(-context // page_size) for context in contexts]
    starts, width = [0, *accumulate(counts)], max(counts)
    pages = [start + min(page, count - 1) for start, count in zip(starts, counts, strict=False) for page in range(width)]

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    layout = StepLayout(
        decodes=decodes,
        lengths=lengths,
        contexts=contexts,
        positions_T=ints([at for length, context in zip(lengths, contexts, strict=True) for at in range(context - length, context)]),
        row_T=ints([row for row, length in enumerate(lengths) for _ in range(length)]),
        pages_RM=ints(pages).view(len(lengths), width),
        contexts_R=ints(contexts),
    )
    return layout, starts[-1]
