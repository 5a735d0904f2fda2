"""One stretch of memory for all state: planned first, allocated once, never freed."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from sluice.errors import ConfigError

ALIGN_BYTES = 256  # GPU copies and descriptor lists both like it; a multiple of every dtype's size


def dtype_of(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``. Raises ``ConfigError`` for what isn't a torch dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"dtype {name!r} is unknown", remedy="use torch's short name, like float32"
        )
    return dtype


def bytes_per_row(dtype: str, row_shape: tuple[int, ...]) -> int:
    return prod(row_shape) * dtype_of(dtype).itemsize


@dataclass(frozen=True)
class Carve:
    """``num_bytes`` at ``offset`` of the arena."""

    offset: int
    num_bytes: int


class ArenaPlan:
    """Adds up carve-outs before any memory exists."""

    def __init__(self) -> None:
        self._end = 0

    @property
    def num_bytes(self) -> int:
        return self._end

    def reserve(self, num_bytes: int) -> Carve:
        """A carve-out that starts on an ``ALIGN_BYTES`` boundary."""
        offset = -(-self._end // ALIGN_BYTES) * ALIGN_BYTES
        self._end = offset + num_bytes
        return Carve(offset, num_bytes)


class Arena:
    """The memory of a plan: one zeroed uint8 tensor on one device."""

    def __init__(self, plan: ArenaPlan, device: str) -> None:
        # Host allocators align to less than ALIGN_BYTES: take a little more, shift the start.
        whole = torch.zeros(plan.num_bytes + ALIGN_BYTES, dtype=torch.uint8, device=device)
        shift = -whole.data_ptr() % ALIGN_BYTES
        self._bytes = whole[shift : shift + plan.num_bytes]

    @property
    def bytes(self) -> Tensor:
        """Everything, as uint8 [num_bytes]."""
        return self._bytes

    def rows(self, carve: Carve, first_byte: int, num_rows: int, row_bytes: int) -> Tensor:
        """``num_rows`` rows from ``first_byte`` of a carve-out: a view, uint8 [num_rows, row_bytes]."""
        start = carve.offset + first_byte
        stop = start + num_rows * row_bytes
        assert stop <= carve.offset + carve.num_bytes, "a view past the end of its carve-out"
        return self._bytes[start:stop].view(num_rows, row_bytes)
