"""How models write and read rows, whatever number format the pool keeps them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sluice.layout.component import SCALE_KINDS
from sluice.pools.base import StateMemory
from sluice.pools.block_scale import dequantise, quantise


class StateRows(Protocol):
    """One layer's rows of one component, by physical row number (``pools.rows.physical_rows``)."""

    def write(self, row_T: Tensor, x: Tensor) -> None:
        """Store ``x [T, *row_shape]``, any float type, at rows ``row_T``."""
        ...

    def read(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows of index tensor ``row``, as ``[*row.shape, *row_shape]`` of ``dtype``."""
        ...


@dataclass(frozen=True)
class PlainRows:
    """A row is one stretch of numbers. ``buffer [rows, *row_shape]``."""

    buffer: Tensor

    def write(self, row_T: Tensor, x: Tensor) -> None:
        self.buffer.index_copy_(0, row_T, x.to(self.buffer.dtype))

    def read(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        return self.buffer[row].to(dtype)


@dataclass(frozen=True)
class BlockScaledRows:
    """``values [rows, ..., n]`` and ``scales [rows, ..., n / 32]``, see ``pools.block_scale``."""

    values: Tensor
    scales: Tensor

    def write(self, row_T: Tensor, x: Tensor) -> None:
        for buffer, part in zip((self.values, self.scales), quantise(x), strict=True):
            _codes(buffer).index_copy_(0, row_T, _codes(part))

    def read(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        values, scales = (
            _codes(buffer)[row].view(buffer.dtype) for buffer in (self.values, self.scales)
        )
        return dequantise(values, scales, dtype)


def state_rows(memory: StateMemory, component: str, layer_id: int) -> StateRows:
    """Rows of ``component``, with its scales if it has any. Raises ``PoolError`` for unknown names."""
    buffer = memory.buffer(component, layer_id)
    components = memory.components()
    after = [one.name for one in components].index(component) + 1
    if after < len(components) and components[after].kind in SCALE_KINDS:
        return BlockScaledRows(buffer, memory.buffer(components[after].name, layer_id))
    return PlainRows(buffer)


def _codes(buffer: Tensor) -> Tensor:
    """Bytes instead of 8-bit floats, which many index kernels don't know."""
    return buffer.view(torch.uint8)
