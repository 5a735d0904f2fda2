"""Root-mean-square normalisation, accumulated in at least float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype reductions run in: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) [* weight]`` over the last dimension, in ``x``'s dtype.

    The weight is plain (not ``1 + w``) and is applied before the cast back (Zhang & Sennrich 2019,
    with DeepSeek-V4's rounding order).

    Shapes: ``x [..., C]``, ``weight [C]`` or None, result ``[..., C]``.
    """
    wide = accumulation_dtype(x.dtype)
    if weight is not None:
        weight = weight.to(wide)
    return F.rms_norm(x.to(wide), x.shape[-1:], weight, eps).to(x.dtype)
