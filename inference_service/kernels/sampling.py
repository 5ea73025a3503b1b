"""Drawing tokens: temperature, top-k, top-p, min-p, then Gumbel-max with noise that a counter makes.

The noise of a token is a hash of (seed, choice, position, token id), so a draw is the same on any device and in any batch.
Shapes: R rows, X rows that draw at random, F of these with a filter, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draws:
    """How the rows of a step draw. The fields X hold one value a random row, in the rows' order; all other rows are greedy."""

    random_X: Tensor
    """Which rows draw at random."""
    filtered_F: Tensor
    """Which of the random rows have a filter (indices into X)."""
    top_k_limit: int
    """The largest top_k of the rows that have one; 0 where none has."""
    any_top_p: bool
    """Whether a filtered row has a top_p below 1."""
    temperature_X: Tensor
    """float32, above 0."""
    top_k_X: Tensor
    """int64; where all are to be kept, a number beyond any vocabulary."""
    top_p_X: Tensor
    min_p_X: Tensor
    seed_X: Tensor
    """int64, all 64 bits of it."""
    position_X: Tensor
    """Where the drawn token will stand in its sequence."""


class Sampling(Protocol):
    """Draws a token a row, as ids_R in int64. A logit of -inf is never drawn."""

    def __call__(self, logits_RV: Tensor, draws: Draws) -> Tensor:
        """Draw by fields that the host has sorted out."""
        ...

    def greedy(self, logits_RV: Tensor) -> Tensor:
        """The best of each row."""
        ...

    def sample_padded(
        self,
        logits_RV: Tensor,
        temperature_R: Tensor,
        top_k_R: Tensor,
        top_p_R: Tensor,
        min_p_R: Tensor,
        seed_R: Tensor,
        position_R: Tensor,
    ) -> Tensor:
        """Draw by one value a row in each tensor. float32: temperature (0: greedy), top_p, min_p; int32 or int64: top_k (0, or the
        vocabulary's size and more: all), seed, position."""
        ...


class TorchSampling:
    """Plain tensor operations; a step of greedy rows is one argmax. `sample_padded` waits for the device: it is the reference."""

    def greedy(self, logits_RV: Tensor) -> Tensor:
        return logits_RV.argmax(dim=-1)

    def sample_padded(
        self,
        logits_RV: Tensor,
        temperature_R: Tensor,
        top_k_R: Tensor,
        top_p_R: Tensor,
        min_p_R: Tensor,
        seed_R: Tensor,
        position_R: Tensor,
    ) -> Tensor:
        random_X = temperature_R.nonzero().flatten()
        values = (temperature_R, top_k_R, top_p_R, min_p_R, seed_R, position_R)
        temperature_X, top_k_X, top_p_X, min_p_X, seed_X, position_X = (tensor[random_X] for tensor in values)
        top_k_X = torch.where(top_k_X > 0, top_k_X.to(torch.int64), 1 << 31)
        limited_X = top_k_X < logits_RV.shape[-1]
        filtered_F = (limited_X | (top_p_X < 1) | (min_p_X > 0)).nonzero().flatten()
        draws = Draws(
            random_X=random_X,
            filtered_F=filtered_F,
            top_k_limit=int(top_k_X[limited_X].max()) if limited_X.any() else 0,
            any_top_p=bool((top_p_X < 1).any()),
            temperature_X=temperature_X,
            top_k_X=top_k_X,
            top_p_X=top_p_X,
            min_p_X=min_p_X,
            seed_X=seed_X.to(torch.int64),
            position_X=position_X.to(torch.int64),
        )
        return self(logits_RV, draws)

    def __call__(self, logits_RV: Tensor, draws: Draws) -> Tensor:
        ids_R = logits_RV.argmax(dim=-1)
        if len(draws.random_X):
            logits_XV = logits_RV[draws.random_X].float()
            # Relative to the best: no temperature, however small, can overflow.
            logits_XV = (logits_XV - logits_XV.amax(dim=-1, keepdim=True)) / draws.temperature_X.unsqueeze(1)
            if len(draws.filtered_F):
                logits_XV[draws.filtered_F] = _filter(logits_XV[draws.filtered_F], draws)
            noise_XV = gumbel(draws.seed_X, draws.position_X, logits_XV.shape[-1])
            ids_R[draws.random_X] = noise_XV.add_(logits_XV).argmax(dim=-1)
        return ids_R


class TritonSampling:
    """Own kernels: thresholds found by search, then noise, sum and argmax in one pass. Nothing waits, no shape depends on data."""

    def __init__(self) -> None:
        from inference_service.kernels import triton_sampling

        self._kernels: Any = triton_sampling

    def greedy(self, logits_RV: Tensor) -> Tensor:
        ids_R: Tensor = self._kernels.greedy(logits_RV)
        return ids_R

    def sample_padded(
        self,
        logits_RV: Tensor,
        temperature_R: Tensor,
        top_k_R: Tensor,
        top_p_R: Tensor,
        min_p_R: Tensor,
        seed_R: Tensor,
        position_R: Tensor,
    ) -> Tensor:
        return self._draw(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, seed_R, position_R)

    def _draw(self, logits_RV: Tensor, *parameters: Any) -> Tensor:
        """`parameters` as in `sample_padded`, then whether any row has a top_k, and a top_p."""
        ids_R: Tensor = self._kernels.draw(logits_RV, *parameters)
        return ids_R

    def __call__(self, logits_RV: Tensor, draws: Draws) -> Tensor:
        if not len(draws.random_X):
            return self.greedy(logits_RV)

        def spread(values_X: Tensor) -> Tensor:
            return values_X.new_zeros(len(logits_RV)).index_copy_(0, draws.random_X, values_X)

        rows = (spread(draws.temperature_X), spread(draws.top_k_X), spread(draws.top_p_X), spread(draws.min_p_X))
        any_filter = bool(draws.top_k_limit), draws.any_top_p
        return self._draw(logits_RV, *rows, spread(draws.seed_X), spread(draws.position_X), *any_filter)


def _filter(logits_FV: Tensor, draws: Draws) -> Tensor:
    """-inf for what top-k, top-p and min-p remove, each judging what the one before it left. The best logit of each row must be 0."""
    top_k_F1, top_p_F1, min_p_F1 = (values[draws.filtered_F].unsqueeze(1) for values in (draws.top_k_X, draws.top_p_X, draws.min_p_X))
    thresholds_F1 = min_p_F1.log()
    limited_F = top_k_F1.squeeze(1) <= draws.top_k_limit
    # Rows without top-k go by themselves: among the others, their k best would be the whole vocabulary, sorted.
    for rows_G, limit in ((limited_F.nonzero().flatten(), draws.top_k_limit), (limited_F.logical_not().nonzero().flatten(), 0)):
        if len(rows_G) and (limit or draws.any_top_p):
            kept_G1 = _threshold(logits_FV[rows_G], top_k_F1[rows_G], limit, top_p_F1[rows_G], draws.any_top_p)
            thresholds_F1[rows_G] = thresholds_F1[rows_G].maximum(kept_G1)
    return logits_FV.masked_fill(logits_FV < thresholds_F1, float("-inf"))


def _threshold(logits_GV: Tensor, top_k_G1: Tensor, limit: int, top_p_G1: Tensor, any_top_p: bool) -> Tensor:
    """The least logit_G1 that top-k (where `limit`, the largest, is not 0) and top-p keep.

    Each filter is a threshold on the logit, so that equal logits share their fate, and no row has to be sorted.
    """
    left_GC, threshold_G1 = logits_GV, torch.full_like(top_p_G1, float("-inf"))
    if limit:
        count = min(limit, logits_GV.shape[-1])
        top_k_G1 = top_k_G1.clamp(max=count)
        left_GC = logits_GV.topk(count, dim=-1).values
        threshold_G1 = left_GC.gather(1, top_k_G1 - 1)
        left_GC = left_GC.masked_fill(torch.arange(count, device=left_GC.device) >= top_k_G1, float("-inf"))
    if any_top_p:
        threshold_G1 = threshold_G1.maximum(_nucleus(left_GC, top_p_G1).masked_fill(top_p_G1 >= 1, float("-inf")))
    return threshold_G1


def _nucleus(logits_FC: Tensor, top_p_F1: Tensor) -> Tensor:
    """The least logit of the fewest most probable tokens that together reach top_p, by bisection, which is far faster than sorting.

    Logits are at most 0. Below -80 no probability is left; 27 halvings leave 1e-6, and logits as near to each other share their fate.
    """
    mass_FC = logits_FC.exp()
    wanted_F1 = mass_FC.sum(dim=-1, keepdim=True) * top_p_F1
    low_F1, high_F1 = torch.full_like(top_p_F1, -80.0), torch.zeros_like(top_p_F1)
    kept_FC = torch.empty_like(mass_FC)
    for _ in range(27):
        middle_F1 = (low_F1 + high_F1) / 2
        torch.ge(logits_FC, middle_F1, out=kept_FC)
        reaches_F1 = kept_FC.mul_(mass_FC).sum(dim=-1, keepdim=True) >= wanted_F1
        low_F1, high_F1 = torch.where(reaches_F1, middle_F1, low_F1), torch.where(reaches_F1, high_F1, middle_F1)
    return low_F1


def gumbel(seed_X: Tensor, position_X: Tensor, vocabulary: int, choice: int = 0) -> Tensor:
    """Standard Gumbel noise_XV in float32, a pure function of (seed, choice, position, token id)."""
    low_X, high_X = _words(seed_X)
    first_X, second_X = _words(position_X)
    words = (low_X, high_X, torch.full_like(low_X, choice), first_X, second_X)
    # Two 32-bit keys a row: rows of one key in common still differ in all their noise.
    keys = [torch.full_like(low_X, start) for start in (0x243F6A88, 0x13198A2E)]
    for word in words:
        keys = [_mix(key ^ word).add_(0x3707344A) for key in keys]
    bits_XV = torch.arange(vocabulary, dtype=torch.int32, device=seed_X.device) ^ keys[0].unsqueeze(1)
    bits_XV = _mix(_mix(bits_XV) ^ keys[1].unsqueeze(1))
    # Uniform in (0, 1) from 32 bits, half a step off the ends. Float32 keeps what is near 0 exact, and that end, as an exponential
    # variable -log(1 - u), makes the large noise that wins draws; only the other end is rounded, and kept from reaching 1.
    uniform_XV = bits_XV.to(torch.float32).mul_(2.0**-32)
    uniform_XV += (uniform_XV < 0).to(torch.float32)
    uniform_XV.add_(2.0**-33).clamp_(max=1 - 2.0**-24)
    return torch.log1p(uniform_XV.neg_()).neg_().log_().neg_()


def _words(values: Tensor) -> tuple[Tensor, Tensor]:
    """The low and high halves of int64 values, as int32."""
    low, high = values.contiguous().view(torch.int32).view(-1, 2).unbind(1)
    return low, high


def _mix(bits: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer, in place: each input bit flips each output bit with probability one half."""
    bits.bitwise_xor_(_shift(bits, 16)).mul_(-0x7A143595)
    bits.bitwise_xor_(_shift(bits, 13)).mul_(-0x3D4D51CB)
    return bits.bitwise_xor_(_shift(bits, 16))


def _shift(bits: Tensor, by: int) -> Tensor:
    """A logical right shift; int32's own repeats the sign."""
    return bits.bitwise_right_shift(by).bitwise_and_((1 << (32 - by)) - 1)
