"""The pairs of a token and an expert by expert, in Triton, and cut into tiles where that is wanted.

Shapes: T tokens, E experts, K experts a token, A = T K pairs, N tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_service.kernels.triton_launch import Launched, dependent_launch

FEW, MANY = (256, 4), (4096, 8)
"""Pairs that are looked at together, and warps that do so: without tiles and with them."""


@Launched
@triton.jit(do_not_specialize=["pairs"])
def _list(ids_A, pairs_EA, counts_E, tiles_N2, pairs, LISTED: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    """The pairs of one expert in their order, how many there are, and its tiles: the expert, and where in its list each begins.

    The experts before have `before` pairs, and so at most before / TILE + expert tiles, behind which this one's stand. Up to where the
    next one's do, some may begin behind its last pair; so do those behind the last expert's, where ids name no expert.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    pairs_A = pairs_EA + expert.to(tl.int64) * pairs
    count, before = 0, 0
    for begin in range(0, pairs, LISTED):
        pair = begin + tl.arange(0, LISTED)
        ids = tl.load(ids_A + pair, mask=pair < pairs, other=-1)
        mine = (ids == expert).to(tl.int32)
        tl.store(pairs_A + count + tl.cumsum(mine, 0) - 1, pair, mask=mine != 0)
        count += tl.sum(mine, 0)
        if TILE:
            before += tl.sum(((ids >= 0) & (ids < expert)).to(tl.int32), 0)
    tl.store(counts_E + expert, count)
    if TILE:
        first = before // TILE + expert
        known = before + count if expert + 1 < tl.num_programs(0) else pairs
        end = known // TILE + expert + 1
        for begin in range(first, end, 32):
            tile = begin + tl.arange(0, 32)
            tl.store(tiles_N2 + tile * 2, tl.zeros([32], tl.int32) + expert, mask=tile < end)
            tl.store(tiles_N2 + tile * 2 + 1, (tile - first) * TILE, mask=tile < end)


def list_pairs(ids_TK: Tensor, experts: int, tile: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    """pairs_EA, of which each expert's first counts_E are its own; and with `tile`, the pairs of one, tiles_N2: an expert, and the place in
    its list where the tile begins. Behind its last pair there is nothing to compute."""
    pairs, device = ids_TK.numel(), ids_TK.device
    pairs_EA = torch.empty(experts, pairs, dtype=torch.int32, device=device)
    counts_E = torch.empty(experts, dtype=torch.int32, device=device)
    tiles_N2 = torch.empty(pairs // tile + experts, 2, dtype=torch.int32, device=device) if tile else None
    listed, warps = MANY if tile else FEW
    options = {"LISTED": listed, "TILE": tile, "num_warps": warps, **dependent_launch(device)}
    _list[(experts,)](ids_TK, pairs_EA, counts_E, tiles_N2, pairs, **options)
    return pairs_EA, counts_E, tiles_N2
