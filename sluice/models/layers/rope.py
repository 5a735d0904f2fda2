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
    """Turns of some positions: ``exp(i * angle)``, complex ``[..., F]``, one a pair (2i, 2i+1)."""

    turn: Tensor

    def per_head(self) -> Rotation:
        """The same rotation for vectors with a head dimension before the channels."""
        return Rotation(self.turn.unsqueeze(-2))


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
    return Rotation(torch.polar(torch.ones_like(angles), angles))


def apply_rope(x: Tensor, rotation: Rotation, *, inverse: bool = False) -> Tensor:
    """Turn the trailing ``2F`` channels of ``x [..., C]``; ``inverse`` turns them back.

    ``rotation`` must broadcast against ``x`` without its last dimension (see ``per_head``).
    """
    turn = rotation.turn.conj() if inverse else rotation.turn
    rope_dim = 2 * turn.shape[-1]
    plain, paired = x.split([x.shape[-1] - rope_dim, rope_dim], dim=-1)
    wide = paired.to(accumulation_dtype(x.dtype))
    # A pair is one complex number, so that turning it is one multiplication.
    turned = torch.view_as_complex(wide.reshape(*wide.shape[:-1], -1, 2)) * turn
    return torch.cat((plain, torch.view_as_real(turned).flatten(-2).to(x.dtype)), dim=-1)
