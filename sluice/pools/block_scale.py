"""Block-scaled rows: e4m3 values with one power-of-two scale for every 32 along the last axis.

The format is MXFP8 (OCP Microscaling Formats 1.0), but a block's scale is the smallest power of two that
keeps its largest value in range, where the specification's own rule would clip up to an eighth of it.
Values and scales are components of their own: whatever moves or digests rows sees two plain buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sluice.errors import GeometryError
from sluice.layout.component import Coverage, Kind
from sluice.pools.base import BufferSpec

MXFP8 = "mxfp8"  # the ``kv_dtype`` that means this format
BLOCK_VALUES = 32

_SUFFIX = ".scale"
_VALUES = torch.float8_e4m3fn
_SCALES = torch.float8_e8m0fnu
# The largest value is 448 = 0.875 * 2**9, in the terms of ``frexp``.
_MAX_MANTISSA, _MAX_EXPONENT = 0.875, 9
_SCALE_BIAS = 127
_NAN_SCALE = 255


def stored(spec: BufferSpec, stretches: Sequence[int] = ()) -> tuple[BufferSpec, ...]:
    """``spec`` as its dtype is kept: itself, or for ``mxfp8`` its values and, right after them, scales.

    ``stretches``: widths that the last axis is made of, where it isn't one; no block may span two.
    Raises ``GeometryError`` for widths that aren't whole blocks.
    """
    if spec.dtype != MXFP8:
        return (spec,)
    width = spec.row_shape[-1]
    _check_blocks(spec, stretches or (width,))
    windowed = spec.coverage is Coverage.WINDOW
    scales = replace(
        spec,
        name=spec.name + _SUFFIX,
        kind=Kind.BLOCK_SCALE_SWA if windowed else Kind.BLOCK_SCALE,
        dtype=_short(_SCALES),
        row_shape=(*spec.row_shape[:-1], width // BLOCK_VALUES),
    )
    return replace(spec, dtype=_short(_VALUES)), scales


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """``[..., n]`` -> e4m3 values ``[..., n]`` and e8m0 scales ``[..., n / 32]``; rounds to nearest even.

    A value is off by at most 1/17 of itself or by 1/1024 of its block's scale. A block that holds an
    infinity or NaN becomes NaN as a whole.
    """
    x_B32 = x.float().unflatten(-1, (-1, BLOCK_VALUES))
    largest_B1 = x_B32.abs().amax(-1, keepdim=True)
    mantissa_B1, exponent_B1 = torch.frexp(largest_B1)
    power_B1 = exponent_B1 - _MAX_EXPONENT + (mantissa_B1 > _MAX_MANTISSA)
    code_B1 = (power_B1 + _SCALE_BIAS).clamp(min=0)
    code_B1 = torch.where(largest_B1.isfinite(), code_B1, _NAN_SCALE)
    scale_B1 = code_B1.to(torch.uint8).view(_SCALES)
    # Dividing by a power of two is exact, so that each value is rounded once.
    values = (x_B32 / scale_B1.float()).to(_VALUES)
    return values.flatten(-2), scale_B1.squeeze(-1)


def dequantise(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``quantise`` made, multiplied out: exact in float32 and, but for its range, in bfloat16."""
    x_B32 = values.float().unflatten(-1, (-1, BLOCK_VALUES)) * scales.float().unsqueeze(-1)
    out: Tensor = x_B32.flatten(-2).to(dtype)
    return out


def _check_blocks(spec: BufferSpec, stretches: Sequence[int]) -> None:
    broken = [width for width in stretches if width % BLOCK_VALUES]
    if broken:
        raise GeometryError(
            f"{spec.name}: kv_dtype {MXFP8!r} has a scale for every {BLOCK_VALUES} values, and a row "
            f"{'x'.join(map(str, spec.row_shape))} has {' + '.join(map(str, stretches))} of them side "
            f"by side: {broken[0]} isn't a multiple of {BLOCK_VALUES}",
            stage="pools",
            remedy=f"use bfloat16, or a model whose widths are multiples of {BLOCK_VALUES}",
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
