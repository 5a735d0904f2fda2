"""The buffers of a pool: typed views into the arena, and what a new owner finds in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from sluice.errors import ConfigError, PoolError
from sluice.layout.component import Component, Entry
from sluice.pools.arena import dtype_of

PATTERN_BYTE = 0xAB
NAN_BYTE = 0xFF  # all ones is a NaN in float64/32/16, bfloat16 and the float8 formats we use


class Fill(Enum):
    """What a new owner finds in its items."""

    NONE = "none"  # pages as their last owner left them, request state zeroed
    NAN = "nan"  # NaN in float buffers, the pattern in others: a byte that never came shows
    PATTERN = "pattern"  # 0xAB everywhere

    @classmethod
    def parse(cls, name: str | None) -> Fill:
        try:
            return cls(name or "none")
        except ValueError:
            raise ConfigError(
                f"fill {name!r} is unknown", remedy="use nan, pattern, or nothing"
            ) from None


@dataclass(frozen=True)
class EntryBuffer:
    """One entry's memory: ``raw`` is uint8 [num_rows, row_bytes], ``rows`` [num_rows, *row_shape]."""

    entry: Entry
    raw: Tensor
    rows: Tensor

    @classmethod
    def over(cls, entry: Entry, raw: Tensor) -> EntryBuffer:
        rows = raw.view(dtype_of(entry.dtype)).view(raw.shape[0], *entry.row_shape)
        return cls(entry, raw, rows)


@dataclass(frozen=True)
class ComponentStorage:
    """A component with the buffers of its entries, in the entries' order."""

    component: Component
    buffers: tuple[EntryBuffer, ...]

    def buffer(self, layer_id: int) -> Tensor:
        """[num_rows, *row_shape]. Raises ``PoolError`` for a layer the component doesn't have."""
        for buffer in self.buffers:
            if buffer.entry.layer_id == layer_id:
                return buffer.rows
        layers = [buffer.entry.layer_id for buffer in self.buffers]
        raise PoolError(f"{self.component.name} has no layer {layer_id}; it has {layers}")

    def write(self, items: Sequence[int], fill: Fill) -> None:
        """Overwrite whole items with the fill (``NONE`` writes zeros)."""
        if not items:
            return
        for buffer in self.buffers:
            by_item = buffer.raw.view(self.component.num_items, -1)
            value = _fill_byte(fill, dtype_of(buffer.entry.dtype))
            by_item[torch.tensor(items, device=by_item.device)] = value


def _fill_byte(fill: Fill, dtype: torch.dtype) -> int:
    match fill:
        case Fill.NONE:
            return 0
        case Fill.NAN:
            return NAN_BYTE if dtype.is_floating_point else PATTERN_BYTE
        case Fill.PATTERN:
            return PATTERN_BYTE


def find(storages: Sequence[ComponentStorage], component: str) -> ComponentStorage:
    """By name. Raises ``PoolError`` naming what there is."""
    for storage in storages:
        if storage.component.name == component:
            return storage
    names = [storage.component.name for storage in storages]
    raise PoolError(f"no component {component!r}; there are {names}")
