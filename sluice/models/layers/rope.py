"""Rotary position embedding on interleaved pairs of the trailing dimensions, with YaRN frequencies.

Shape legend: T tokens, F = rope dims / 2 frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.models.layers.norm import accumulation_dtype


@dataclass(frozen=True)
class RopeParams:
    """One frequency table. ``factor == 1`` means plain rope, anything else YaRN."""

    dim: int
    theta: float
    factor: float = 1.0
    original_max_position_tokens: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of some positions, ``[..., F]`` each; pairs (2i, 2i+1) turn by angle i."""

    cos: Tensor
    sin: Tensor

    def per_head(self) -> Rotation:
        """The same rotation for vectors with a head dimension before the channels."""
        return Rotation(self.cos.unsqueeze(-2), self.sin.unsqueeze(-2))


def rope_frequencies(params: RopeParams, device: torch.device | None = None) -> Tensor:
    """Angular frequency of each pair, ``[F]`` float32 (YaRN: Peng et al. 2023, NTK-by-parts).

    No attention factor: DeepSeek-V4 leaves the logits' scale alone.
    """
    exponents = torch.arange(0, params.dim, 2, dtype=torch.float32, device=device) / params.dim
    freq_F = 1.0 / (params.theta**exponents)
    if params.factor == 1.0:
        return freq_F

    def correction(turns: float) -> float:
        """The dimension whose wave makes ``turns`` turns in the original context."""
        context = params.original_max_position_tokens
        return params.dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(params.theta))

    low = max(math.floor(correction(params.beta_fast)), 0)
    high = min(math.ceil(correction(params.beta_slow)), params.dim - 1)
    span = high - low if high != low else 0.001
    ramp_F = torch.arange(params.dim // 2, dtype=torch.float32, device=device)
    ramp_F = ((ramp_F - low) / span).clamp(0, 1)
    return freq_F / params.factor * ramp_F + freq_F * (1 - ramp_F)


def rotation_at(freq_F: Tensor, positions_T: Tensor) -> Rotation:
    """The rotation of each position (integers, any shape); float32 angles like the references."""
    angles = positions_T.to(freq_F.dtype).unsqueeze(-1) * freq_F
    return Rotation(angles.cos(), angles.sin())


def apply_rope(x: Tensor, rotation: Rotation, *, inverse: bool = False) -> Tensor:
    """Turn the trailing ``2F`` channels of ``x [..., C]``; ``inverse`` turns them back.

    ``rotation`` must broadcast against ``x`` without its last dimension (see ``per_head``).
    """
    cos, sin = rotation.cos, -rotation.sin if inverse else rotation.sin
    rope_dim = 2 * cos.shape[-1]
    plain, turned = x.split([x.shape[-1] - rope_dim, rope_dim], dim=-1)
    wide = turned.to(accumulation_dtype(x.dtype))
    even, odd = wide[..., 0::2], wide[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((plain, pairs.flatten(-2).to(x.dtype)), dim=-1)
