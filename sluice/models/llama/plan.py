"""Index tensors of one batch, shared by all layers: rows to write, rows to read, who sees whom.

A layer writes the batch's rows first and then gathers history by physical row, so that a chunk's own
keys round exactly as they will for every later reader.

Shape legend: T tokens, S segments of a rectangle, N queries a segment, L positions of its longest
segment, G query heads a key/value head. Index tensors are int64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from sluice.layout.component import Component
from sluice.models.base import ForwardBatch, Segment
from sluice.models.llama.rope import Rotation, rotation_at
from sluice.pools.rows import physical_rows

# Gathered keys and values are bounded by taking segments in blocks of about this many values.
_VALUES_A_GATHER = 1 << 24


@dataclass(frozen=True)
class Rectangle:
    """Neighbouring segments with equally many queries: one gather and one attention call."""

    tokens: slice
    queries: int  # N
    row_SL: Tensor  # physical rows; a shorter segment's surplus repeats its position 0
    visible_S1QL: Tensor  # Q = G * N, heads of a group outermost: what each query may see


@dataclass(frozen=True)
class AttentionPlan:
    """What all layers share in a batch."""

    written_row_T: Tensor
    rotation: Rotation
    rectangles: tuple[Rectangle, ...]

    @classmethod
    def of(
        cls, batch: ForwardBatch, component: Component, freq_F: Tensor, group_size: int
    ) -> AttentionPlan:
        values = _values_per_row(component)
        return cls(
            written_row_T=physical_rows(
                component, batch.tables, batch.segment_T, batch.positions_T
            ),
            rotation=rotation_at(freq_F, batch.positions_T),
            rectangles=tuple(
                _rectangle(batch, component, first, count, first_token, group_size)
                for first, count, first_token in _blocks(batch.segments, values)
            ),
        )


def _blocks(segments: tuple[Segment, ...], values: int) -> Iterator[tuple[int, int, int]]:
    """(first segment, count, first token) of each rectangle: decodes together, chunks by size."""
    first = first_token = 0
    for queries, run in groupby(segments, key=lambda segment: len(segment.token_ids)):
        alike = list(run)
        longest = max(segment.stop for segment in alike)
        step = max(1, _VALUES_A_GATHER // (longest * values))
        for at in range(0, len(alike), step):
            count = min(step, len(alike) - at)
            yield first, count, first_token
            first, first_token = first + count, first_token + count * queries


def _rectangle(
    batch: ForwardBatch,
    component: Component,
    first: int,
    count: int,
    first_token: int,
    group_size: int,
) -> Rectangle:
    segments = batch.segments[first : first + count]
    device = batch.positions_T.device
    queries = len(segments[0].token_ids)
    tokens = slice(first_token, first_token + count * queries)
    position_SN = batch.positions_T[tokens].view(count, queries)
    key_L = torch.arange(max(segment.stop for segment in segments), device=device)
    held_SL = key_L <= position_SN[:, -1:]
    segment_S1 = torch.arange(first, first + count, device=device).unsqueeze(1)
    # Row 0 is always there: what a shorter segment gathers past its end is real, and not visible.
    row_SL = physical_rows(
        component, batch.tables, segment_S1.expand_as(held_SL), torch.where(held_SL, key_L, 0)
    )
    visible_SNL = key_L <= position_SN.unsqueeze(-1)
    return Rectangle(tokens, queries, row_SL, visible_SNL.repeat(1, group_size, 1).unsqueeze(1))


def _values_per_row(component: Component) -> int:
    row_shape = component.entries[0].row_shape
    return int(torch.Size(row_shape).numel())
