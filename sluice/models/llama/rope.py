"""Rotary position embedding on channel pairs (i, i + d/2), with linear and Llama-3 frequencies.

Shape legend: T tokens, H heads, d head width, F = d / 2 frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from sluice.models.layers.norm import accumulation_dtype


class RopeKind(Enum):
    """How frequencies are stretched beyond the trained context (values: transformers' names)."""

    DEFAULT = "default"
    LINEAR = "linear"  # position interpolation: every frequency divided (Chen et al. 2023)
    LLAMA3 = "llama3"  # low frequencies divided, high ones kept, a ramp between (Llama 3.1)


@dataclass(frozen=True)
class RopeParams:
    """One frequency table. The last three are Llama-3's: context in tokens, bounds in turns."""

    dim: int
    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_max_position_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class Rotation:
    """Cosine and sine of each token's angles, ``[T, 1, F]`` float32: broadcasts over heads."""

    cos: Tensor
    sin: Tensor


def rope_frequencies(params: RopeParams, device: torch.device | None = None) -> Tensor:
    """Angular frequency of each pair, ``[F]`` float32 (Su et al. 2021; variants: ``RopeKind``)."""
    exponents = torch.arange(0, params.dim, 2, dtype=torch.float32, device=device) / params.dim
    freq_F = 1.0 / (params.theta**exponents)
    match params.kind:
        case RopeKind.DEFAULT:
            return freq_F
        case RopeKind.LINEAR:
            return freq_F / params.factor
        case RopeKind.LLAMA3:
            return _llama3(freq_F, params)


def _llama3(freq_F: Tensor, params: RopeParams) -> Tensor:
    """Blend by how often a pair turns within the original context: 0 = divided, 1 = kept."""
    turns_F = params.original_max_position_tokens * freq_F / (2 * math.pi)
    width = params.high_freq_factor - params.low_freq_factor
    kept_F = ((turns_F - params.low_freq_factor) / width).clamp(0, 1)
    return freq_F * kept_F + freq_F / params.factor * (1 - kept_F)


def rotation_at(freq_F: Tensor, positions_T: Tensor) -> Rotation:
    """The rotation of each position; angles are float32, like the references'."""
    angles_T1F = (positions_T.to(freq_F.dtype).unsqueeze(-1) * freq_F).unsqueeze(1)
    return Rotation(angles_T1F.cos(), angles_T1F.sin())


def apply_rope(x_THd: Tensor, rotation: Rotation) -> Tensor:
    """Turn all channels of ``x``, in its dtype; the first half pairs with the second."""
    first, second = x_THd.to(accumulation_dtype(x_THd.dtype)).chunk(2, dim=-1)
    turned = torch.cat(
        (
            first * rotation.cos - second * rotation.sin,
            second * rotation.cos + first * rotation.sin,
        ),
        dim=-1,
    )
    return turned.to(x_THd.dtype)
