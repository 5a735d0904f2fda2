"""Exact dequantisation of block-scaled weights, chosen by the stored dtype, never by config.

Shape legend: O output channels, I input channels; leading dimensions (experts) pass through.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sluice.parallel.cut import Cuts

FP8_BLOCK = 128  # one scale per 128 x 128 values
FP4_BLOCK = 32  # one scale per 32 values along the input

# e2m1: sign, two exponent bits, one mantissa bit (OCP microscaling formats, v1.0).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PACKED_FP4_DTYPES = (torch.uint8, torch.int8)


def is_quantised(dtype: torch.dtype) -> bool:
    return dtype == torch.float8_e4m3fn or dtype in _PACKED_FP4_DTYPES


def dequantised_shape(stored_shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of the values behind a stored tensor (packed fp4 holds two a byte)."""
    if dtype in _PACKED_FP4_DTYPES:
        return (*stored_shape[:-1], 2 * stored_shape[-1])
    return stored_shape


def scale_shape(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of the scales that belong to ``shape`` dequantised values."""
    *lead, rows, cols = shape
    if dtype in _PACKED_FP4_DTYPES:
        return (*lead, rows, -(-cols // FP4_BLOCK))
    return (*lead, -(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))


def dequantise(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values times their block's scale, in ``dtype``; products are formed in float32.

    ``scale`` is F8_E8M0 (a power of two) or a float type. With power-of-two scales the float32
    result is exact, and so is a bfloat16 one (at most 4 significant bits).
    """
    scale = scale.float()
    if stored.dtype in _PACKED_FP4_DTYPES:
        values = unpack_fp4(stored)
        spread = scale.repeat_interleave(FP4_BLOCK, -1)
    else:
        values = stored.float()
        spread = scale.repeat_interleave(FP8_BLOCK, -2).repeat_interleave(FP8_BLOCK, -1)
    rows, cols = values.shape[-2:]
    return (values * spread[..., :rows, :cols]).to(dtype)


def dequantise_part(
    stored: Tensor, scale: Tensor, dtype: torch.dtype, cuts: Cuts, device: torch.device
) -> Tensor:
    """The part of ``dequantise(stored, scale, dtype)`` that ``cuts`` name, on ``device``.

    Only the scale blocks that hold the part are read and computed.
    """
    if not cuts:
        return dequantise(stored.to(device), scale.to(device), dtype)
    first, *rest = cuts
    axis, dims = first.axis % stored.dim(), stored.dim()
    packed = stored.dtype in _PACKED_FP4_DTYPES
    values = 2 if packed and axis == dims - 1 else 1  # stored in one element along the axis
    block = _block_along(axis, dims, packed)
    parts = []
    for part in first.ranges(stored.shape[axis] * values):
        start, stop = part.start // block, -(-part.stop // block)
        end = min(stop * block, stored.shape[axis] * values)
        covered = dequantise_part(
            stored.narrow(axis, start * block // values, (end - start * block) // values),
            scale.narrow(axis, start, stop - start),
            dtype,
            tuple(rest),
            device,
        )
        parts.append(covered.narrow(axis, part.start - start * block, len(part)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)


def _block_along(axis: int, dims: int, packed: bool) -> int:
    """Values that share a scale along an axis."""
    if packed:
        return FP4_BLOCK if axis == dims - 1 else 1
    return FP8_BLOCK if axis >= dims - 2 else 1


def unpack_fp4(packed: Tensor) -> Tensor:
    """``[..., O, I/2]`` bytes -> ``[..., O, I]`` float32; the low nibble is the even column."""
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], device=packed.device)
    codes = packed.view(torch.uint8)
    return table[torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2).long()]
