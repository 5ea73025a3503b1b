"""Draws filtered by FlashInfer's sorting-free kernels, with the own noise: theirs has one seed for a whole batch.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inference_service.kernels.sampling import TritonSampling

BELOW_ONE = 0.999
"""What FlashInfer is given for a top_p of 1, which it does not take; its result is not used."""


class FlashInferSampling(TritonSampling):
    """Top-k, then top-p of what it left, on probabilities; min-p and the draw are those of the own kernel."""

    def __init__(self) -> None:
        super().__init__()
        from inference_service.kernels import flashinfer_ops

        self._ops = flashinfer_ops

    def _draw(
        self,
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
        random_R1, vocabulary = (temperature_R > 0).unsqueeze(1), logits_RV.shape[-1]
        # Relative to the best: no temperature, however small, can overflow.
        relative_RV = logits_RV.float() - logits_RV.amax(dim=-1, keepdim=True).float()
        p_RV = torch.softmax(torch.where(random_R1, relative_RV / temperature_R.unsqueeze(1), relative_RV), dim=-1)
        if any_top_k:
            limit_R = torch.where(top_k_R > 0, top_k_R, vocabulary).clamp(max=vocabulary).int()
            p_RV = torch.where((limit_R < vocabulary).unsqueeze(1), self._ops.top_k_renorm(p_RV, limit_R), p_RV)
        if any_top_p:
            kept_RV = self._ops.top_p_renorm(p_RV, top_p_R.clamp(max=BELOW_ONE))
            p_RV = torch.where((top_p_R < 1).unsqueeze(1), kept_RV, p_RV)
        left_RV = torch.where(random_R1, p_RV.log(), relative_RV)
        one_R = random_R1.squeeze(1).float()
        nothing_R = torch.zeros_like(top_k_R)
        return super()._draw(left_RV, one_R, nothing_R, torch.ones_like(top_p_R), min_p_R, seed_R, position_R, False, False)
