"""Greedy and filtered random draws over a large vocabulary in Triton, for whole rows at once and without a shape that depends on data.

A row is cut into chunks, each a block of its own, and blocks of a row meet only through small buffers between launches: sums have one order
whatever the batch, and no noise or probability is ever stored. Top-k and top-p are thresholds on the logit, found by a search that splits
[-DEPTH, 0] into WAYS parts a launch, as the reference does by halves.
Shapes: R rows, V vocabulary, S chunks of a row, W ways.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_service.kernels.custom_op import custom_op
from inference_service.kernels.triton_launch import Launched, dependent_launch

CHUNK = 4096
WAYS = 8
PASSES = 9
DEPTH = 80.0
"""Below it no probability is left. 8^9 parts of it are as fine as the reference's 27 halvings."""


@Launched
@triton.jit
def _best(logits_RV, values_RS, ids_RS, V, stride, S, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """The best logit of each chunk, and the lowest id that has it."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_RV + row * stride + tokens, mask=tokens < V, other=float("-inf")).to(tl.float32)
    value, index = tl.max(logits, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(values_RS + row * S + chunk, value)
    tl.store(ids_RS + row * S + chunk, chunk * CHUNK + index)


@Launched
@triton.jit
def _combine(values_RS, ids_RS, ids_R, V, S, BLOCK_S: tl.constexpr, PDL: tl.constexpr):
    """The best of the chunks' best."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, BLOCK_S)
    values = tl.load(values_RS + row * S + chunks, mask=chunks < S, other=float("-inf"))
    _, best = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    # Logits of NaN must not lead to an id that does not exist.
    best_id = tl.load(ids_RS + row * S + tl.minimum(best, S - 1))
    tl.store(ids_R + row, tl.minimum(tl.maximum(best_id, 0), V - 1).to(tl.int64))


@triton.jit
def _scale(temperature):
    return 1.0 / tl.maximum(temperature, 1e-30)


@triton.jit
def _row_best(values_RS, row, S, BLOCK_S: tl.constexpr):
    chunks = tl.arange(0, BLOCK_S)
    return tl.max(tl.load(values_RS + row * S + chunks, mask=chunks < S, other=float("-inf")), 0)


@triton.jit
def _chunk_sums(sums_RSW, row, S, BLOCK_S: tl.constexpr, WAYS: tl.constexpr):
    chunks, ways = tl.arange(0, BLOCK_S)[:, None], tl.arange(0, WAYS)[None, :]
    return tl.sum(tl.load(sums_RSW + (row * S + chunks) * WAYS + ways, mask=chunks < S, other=0.0), 0)


@triton.jit
def _narrow(low, width, sums_W, target, WAYS: tl.constexpr):
    """The last of WAYS thresholds that reaches the target; the first one always does."""
    reached = tl.sum((sums_W >= target).to(tl.int32), 0)
    return low + width / WAYS * (tl.maximum(reached, 1) - 1).to(tl.float32)


@triton.jit
def _is_active(temperature, parameter, V, MASS: tl.constexpr):
    if MASS:
        return (temperature > 0) & (parameter < 1)
    else:
        return (temperature > 0) & (parameter > 0) & (parameter < V)


@Launched
@triton.jit(do_not_specialize=["index"])
def _search(
    logits_RV,
    values_RS,
    temperature_R,
    parameter_R,
    bound_R,
    target_R,
    old_low_R,
    old_sums_RSW,
    new_low_R,
    new_sums_RSW,
    index,
    width,
    V,
    stride,
    S,
    MASS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WAYS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Narrow the interval by the last launch's sums, then sum this chunk's tokens (MASS: their probabilities) above each new threshold."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, parameter = tl.load(temperature_R + row), tl.load(parameter_R + row).to(tl.float32)
    if _is_active(temperature, parameter, V, MASS):
        low = -DEPTH
        if index > 0:
            sums_W = _chunk_sums(old_sums_RSW, row, S, BLOCK_S, WAYS)
            target = parameter
            if MASS:
                if index == 1:
                    target = parameter * tl.max(sums_W, 0)
                    if chunk == 0:
                        tl.store(target_R + row, target)
                else:
                    target = tl.load(target_R + row)
            low = _narrow(tl.load(old_low_R + row), width * WAYS, sums_W, target, WAYS)
        if chunk == 0:
            tl.store(new_low_R + row, low)
        best, scale = _row_best(values_RS, row, S, BLOCK_S), _scale(temperature)
        bound = tl.load(bound_R + row)
        ways = tl.arange(0, WAYS)[:, None]
        thresholds = low + width / WAYS * ways.to(tl.float32)
        sums = tl.zeros([WAYS, BLOCK], tl.float32)
        for start in tl.static_range(0, CHUNK, BLOCK):
            tokens = chunk * CHUNK + start + tl.arange(0, BLOCK)[None, :]
            logits = tl.load(logits_RV + row * stride + tokens, mask=tokens < V, other=float("-inf")).to(tl.float32)
            logits = (logits - best) * scale
            amounts = tl.where(logits >= bound, tl.exp(logits), 0.0) if MASS else tl.where(logits >= -DEPTH, 1.0, 0.0)
            sums += tl.where(logits >= thresholds, amounts, 0.0)
        offsets = (row * S + chunk) * WAYS + tl.arange(0, WAYS)
        tl.store(new_sums_RSW + offsets, tl.sum(sums, 1))


@Launched
@triton.jit
def _settle(
    temperature_R,
    parameter_R,
    bound_R,
    target_R,
    low_R,
    sums_RSW,
    width,
    V,
    S,
    MASS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WAYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Raise the row's bound to the threshold that was found."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    temperature, parameter = tl.load(temperature_R + row), tl.load(parameter_R + row).to(tl.float32)
    if _is_active(temperature, parameter, V, MASS):
        target = parameter
        if MASS:
            target = tl.load(target_R + row)
        low = _narrow(tl.load(low_R + row), width, _chunk_sums(sums_RSW, row, S, BLOCK_S, WAYS), target, WAYS)
        tl.store(bound_R + row, tl.maximum(tl.load(bound_R + row), low))


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def _key(start: tl.constexpr, low, high, first, second):
    key = _mix(low ^ start) + 0x3707344A
    key = _mix(key ^ high) + 0x3707344A
    key = _mix(key) + 0x3707344A  # The choice is 0.
    key = _mix(key ^ first) + 0x3707344A
    return _mix(key ^ second) + 0x3707344A


@triton.jit
def _gumbel(seed, position, tokens):
    """The noise of `sampling.gumbel`: the same bits, and logarithms that may differ in their last place."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    first, second = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    bits = _mix(_mix(tokens.to(tl.uint32) ^ _key(0x243F6A88, low, high, first, second)) ^ _key(0x13198A2E, low, high, first, second))
    uniform = bits.to(tl.int32, bitcast=True).to(tl.float32) * (2.0**-32)
    uniform += tl.where(uniform < 0, 1.0, 0.0)
    uniform = tl.minimum(uniform + 2.0**-33, 1 - 2.0**-24)
    # -log1p(-u): the logarithm of what 1 - u was rounded to, corrected by how far it was rounded.
    rest = 1 - uniform
    exponential = tl.where(rest == 1, uniform, -tl.log(rest) * (uniform / tl.where(rest == 1, 1.0, 1 - rest)))
    return -tl.log(exponential)


@Launched
@triton.jit
def _draw(
    logits_RV,
    values_RS,
    ids_RS,
    temperature_R,
    min_p_R,
    seed_R,
    position_R,
    bound_R,
    drawn_values_RS,
    drawn_ids_RS,
    V,
    stride,
    S,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """The chunk's best sum of logit and noise among what the filters left; a greedy row's best logit as it is."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_R + row)
    if temperature > 0:
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        logits = tl.load(logits_RV + row * stride + tokens, mask=tokens < V, other=float("-inf")).to(tl.float32)
        logits = (logits - _row_best(values_RS, row, S, BLOCK_S)) * _scale(temperature)
        bound = tl.maximum(tl.load(bound_R + row), tl.log(tl.load(min_p_R + row)))
        noise = _gumbel(tl.load(seed_R + row).to(tl.int64), tl.load(position_R + row).to(tl.int64), tokens)
        keys = tl.where(logits >= bound, logits + noise, float("-inf"))
        value, index = tl.max(keys, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(drawn_values_RS + row * S + chunk, value)
        tl.store(drawn_ids_RS + row * S + chunk, chunk * CHUNK + index)
    else:
        tl.store(drawn_values_RS + row * S + chunk, tl.load(values_RS + row * S + chunk))
        tl.store(drawn_ids_RS + row * S + chunk, tl.load(ids_RS + row * S + chunk))


class _Rows:
    """The rows of one call: their chunks, the best of each, and launches over all chunks."""

    def __init__(self, logits_RV: Tensor) -> None:
        self.logits_RV, self.device = logits_RV, logits_RV.device
        self.rows, self.vocabulary = logits_RV.shape
        self.chunks = triton.cdiv(self.vocabulary, CHUNK)
        self.block_s = triton.next_power_of_2(self.chunks)
        self.launch = dependent_launch(self.device)
        self.values_RS, self.ids_RS = self.floats(self.chunks), self.empty(torch.int32, self.chunks)
        sizes = (self.vocabulary, logits_RV.stride(0), self.chunks)
        _best[self.grid](logits_RV, self.values_RS, self.ids_RS, *sizes, CHUNK=CHUNK, num_warps=8, **self.launch)

    @property
    def grid(self) -> tuple[int, int]:
        return self.rows, self.chunks

    def empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(self.rows, *shape, dtype=dtype, device=self.device)

    def floats(self, *shape: int) -> Tensor:
        return self.empty(torch.float32, *shape)

    def combine(self, values_RS: Tensor, ids_RS: Tensor) -> Tensor:
        ids_R = self.empty(torch.int64)
        _combine[(self.rows,)](values_RS, ids_RS, ids_R, self.vocabulary, self.chunks, BLOCK_S=self.block_s, num_warps=1, **self.launch)
        return ids_R

    def raise_bound(self, bound_R: Tensor, temperature_R: Tensor, parameter_R: Tensor, mass: bool) -> None:
        """Raise each row's bound to its top-k (`mass`: top-p) threshold, among what the bound keeps."""
        lows, sums = [self.floats(), self.floats()], [self.floats(self.chunks, WAYS), self.floats(self.chunks, WAYS)]
        target_R, width = self.floats(), DEPTH
        common = {"MASS": mass, "BLOCK_S": self.block_s, "WAYS": WAYS} | self.launch
        for index in range(PASSES):
            _search[self.grid](
                self.logits_RV,
                self.values_RS,
                temperature_R,
                parameter_R,
                bound_R,
                target_R,
                lows[index % 2],
                sums[index % 2],
                lows[1 - index % 2],
                sums[1 - index % 2],
                index,
                width,
                self.vocabulary,
                self.logits_RV.stride(0),
                self.chunks,
                CHUNK=CHUNK,
                BLOCK=1024,
                DEPTH=DEPTH,
                num_warps=8,
                **common,
            )
            width /= WAYS
        last, width = PASSES % 2, width * WAYS
        _settle[(self.rows,)](
            temperature_R,
            parameter_R,
            bound_R,
            target_R,
            lows[last],
            sums[last],
            width,
            self.vocabulary,
            self.chunks,
            num_warps=4,
            **common,
        )


def _ids(logits_RV: Tensor, *parameters: Tensor, **which: bool) -> Tensor:
    return logits_RV.new_empty(len(logits_RV), dtype=torch.int64)


@custom_op(_ids)
def greedy(logits_RV: Tensor) -> Tensor:
    """The ids_R of the best logits; of equal ones, the lowest id. The last dimension is contiguous."""
    rows = _Rows(logits_RV)
    return rows.combine(rows.values_RS, rows.ids_RS)


@custom_op(_ids)
def draw(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    any_top_k: bool = True,
    any_top_p: bool = True,
) -> Tensor:
    """The drawn ids_R; see `Sampling.sample_padded`."""
    rows = _Rows(logits_RV)
    bound_R = torch.full_like(temperature_R, float("-inf"))
    if any_top_k:
        rows.raise_bound(bound_R, temperature_R, top_k_R, mass=False)
    if any_top_p:
        rows.raise_bound(bound_R, temperature_R, top_p_R, mass=True)
    values_RS, ids_RS = torch.empty_like(rows.values_RS), torch.empty_like(rows.ids_RS)
    _draw[rows.grid](
        logits_RV,
        rows.values_RS,
        rows.ids_RS,
        temperature_R,
        min_p_R,
        seed_R,
        position_R,
        bound_R,
        values_RS,
        ids_RS,
        rows.vocabulary,
        logits_RV.stride(0),
        rows.chunks,
        CHUNK=CHUNK,
        BLOCK_S=rows.block_s,
        num_warps=8,
        **rows.launch,
    )
    return rows.combine(values_RS, ids_RS)
