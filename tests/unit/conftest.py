"""Lets Triton interpret its kernels where there is no GPU. It decides when it is imported, so this stands before any test's import."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
