"""Index tensors of one batch: which state rows each token reads and writes. Shared by all layers.

Every kind of per-token state is read through a *workspace*: prior rows gathered from the pool before
anything is written, followed by the batch's own rows. So a chunk may be longer than a ring, and a
ring's rows may be overwritten by the chunk that still reads them.

Shape legend: T tokens, S segments, Q prior rows, K window keys a token, M windows that close in the
batch, P slots a window pools, E compressed entries (of the longest segment), U rows to store.
All index tensors are int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from sluice.layout.component import Component, Coverage, Space
from sluice.models.base import ForwardBatch
from sluice.pools.base import BatchTables
from sluice.pools.rows import physical_rows


@dataclass(frozen=True)
class Segments:
    """Where each segment starts and stops (positions), and its first row in the batch: ``[S]`` each."""

    start_S: Tensor
    stop_S: Tensor
    first_S: Tensor
    segment_T: Tensor
    position_T: Tensor
    tables: BatchTables
    longest_tokens: int  # the highest stop

    @classmethod
    def of(cls, batch: ForwardBatch) -> Segments:
        device = batch.positions_T.device
        bounds = torch.tensor(
            [[segment.start, segment.stop] for segment in batch.segments], device=device
        )
        start_S, stop_S = bounds.unbind(1)
        length_S = stop_S - start_S
        return cls(
            start_S=start_S,
            stop_S=stop_S,
            first_S=length_S.cumsum(0) - length_S,
            segment_T=batch.segment_T,
            position_T=batch.positions_T,
            tables=batch.tables,
            longest_tokens=max(segment.stop for segment in batch.segments),
        )

    @property
    def num_tokens(self) -> int:
        return self.position_T.shape[0]


@dataclass(frozen=True)
class Prior:
    """Rows that are read from a pool: positions ``from_S .. from_S + count`` of each segment."""

    from_S: Tensor
    offset_S: Tensor  # a segment's first prior row in the workspace
    row_Q: Tensor  # physical rows

    @classmethod
    def of(cls, segments: Segments, from_S: Tensor, component: Component) -> Prior:
        """All positions from ``from_S`` up to each segment's start."""
        count_S = (segments.start_S - from_S).clamp(min=0)
        offset_S = count_S.cumsum(0) - count_S
        segment_Q, step_Q = _ragged(count_S)
        row_Q = physical_rows(component, segments.tables, segment_Q, from_S[segment_Q] + step_Q)
        return cls(from_S, offset_S, row_Q)

    def workspace_row(self, segments: Segments, segment: Tensor, position: Tensor) -> Tensor:
        """Workspace row of each (segment, position); meaningless for positions in neither part."""
        in_batch = (
            len(self.row_Q) + segments.first_S[segment] + position - segments.start_S[segment]
        )
        in_prior = self.offset_S[segment] + position - self.from_S[segment]
        return torch.where(position >= segments.start_S[segment], in_batch, in_prior)

    def workspace(self, buffer: Tensor, rows_T: Tensor) -> Tensor:
        """Prior rows, then the batch's (already in the pool's dtype, so that both round alike)."""
        if len(self.row_Q) == 0:
            return rows_T
        return torch.cat((buffer[self.row_Q], rows_T))


@dataclass(frozen=True)
class Store:
    """Which batch rows go into the pool, and where: the last ones of each segment that fit."""

    token_U: Tensor
    row_U: Tensor

    @classmethod
    def of(cls, segments: Segments, component: Component) -> Store:
        token_U = torch.arange(segments.num_tokens, device=segments.position_T.device)
        # A page of the window holds every position; a ring or tail only the last few, and writing
        # more would hit the same row twice in unspecified order.
        if component.space is not Space.WINDOW_PAGE or component.coverage is not Coverage.WINDOW:
            oldest_S = segments.stop_S - component.rows_per_item
            token_U = token_U[segments.position_T >= oldest_S[segments.segment_T]]
        segment_U, position_U = segments.segment_T[token_U], segments.position_T[token_U]
        return cls(token_U, physical_rows(component, segments.tables, segment_U, position_U))

    def write(self, buffer: Tensor, rows_T: Tensor) -> None:
        buffer.index_copy_(0, self.row_U, rows_T[self.token_U])


@dataclass(frozen=True)
class WindowPlan:
    """Raw keys of each token: the last W positions up to its own."""

    prior: Prior
    store: Store
    key_TK: Tensor  # workspace rows; the token's own row where not visible
    visible_TK: Tensor

    @classmethod
    def of(
        cls, segments: Segments, component: Component, valid_from_S: Tensor | None = None
    ) -> WindowPlan:
        """``valid_from_S``: lower positions of a segment were never received and must not be read."""
        window = component.window_tokens
        floor_S = torch.zeros_like(segments.start_S) if valid_from_S is None else valid_from_S
        # Never beyond the start: rows of the batch itself are always there.
        from_S = (segments.start_S - window + 1).clamp(min=0).maximum(floor_S)
        from_S = from_S.minimum(segments.start_S)
        prior = Prior.of(segments, from_S, component)
        width = min(window, segments.longest_tokens)
        back_K = torch.arange(width - 1, -1, -1, device=from_S.device)
        position_TK = segments.position_T.unsqueeze(1) - back_K
        segment_T1 = segments.segment_T.unsqueeze(1)
        visible_TK = position_TK >= from_S[segment_T1]
        own_T1 = torch.arange(segments.num_tokens, device=from_S.device).unsqueeze(1)
        key_TK = torch.where(
            visible_TK,
            prior.workspace_row(segments, segment_T1, position_TK),
            len(prior.row_Q) + own_T1,
        )
        return cls(prior, Store.of(segments, component), key_TK, visible_TK)


@dataclass(frozen=True)
class TailPlan:
    """Compressor windows that close in the batch, and the pending rows they and later ones need."""

    prior: Prior
    store: Store
    slot_MP: Tensor  # workspace rows each window pools
    first_M: Tensor  # windows without one before (overlap only)
    segment_M: Tensor
    ordinal_M: Tensor

    @classmethod
    def of(cls, segments: Segments, component: Component) -> TailPlan:
        ratio = component.window_tokens
        overlap = ratio if component.coverage is Coverage.OVERLAP_TAIL else 0
        first_S = segments.start_S // ratio
        count_S = segments.stop_S // ratio - first_S
        needed_S = (first_S * ratio - overlap).clamp(min=0)
        # Where nothing closes, nothing is read.
        from_S = torch.where(count_S > 0, needed_S, segments.start_S)
        prior = Prior.of(segments, from_S, component)
        segment_M, step_M = _ragged(count_S)
        ordinal_M = first_S[segment_M] + step_M
        slot_P = torch.arange(-overlap, ratio, device=from_S.device)
        position_MP = ordinal_M.unsqueeze(1) * ratio + slot_P
        slot_MP = prior.workspace_row(segments, segment_M.unsqueeze(1), position_MP)
        return cls(
            prior=prior,
            store=Store.of(segments, component),
            # A first window's missing slots may point anywhere valid: they are masked when pooled.
            slot_MP=torch.where(position_MP >= 0, slot_MP, 0),
            first_M=ordinal_M == 0,
            segment_M=segment_M,
            ordinal_M=ordinal_M,
        )

    @property
    def closes(self) -> bool:
        return len(self.ordinal_M) > 0


@dataclass(frozen=True)
class Rectangle:
    """Neighbouring segments of one length: ``segments x length`` tokens, for one batched matmul."""

    segments: slice
    tokens: slice
    length: int


@dataclass(frozen=True)
class EntryPlan:
    """Compressed entries each token may see: the first ``visible_T`` of its segment."""

    row_SE: Tensor  # physical rows; entries past a segment's last are padding
    segment_T: Tensor
    visible_T: Tensor
    closing_row_M: Tensor  # where this batch's new entries go
    rectangles: tuple[Rectangle, ...]

    @classmethod
    def of(
        cls, batch: ForwardBatch, segments: Segments, component: Component, tail: TailPlan
    ) -> EntryPlan:
        ratio = component.tokens_per_row
        most = segments.longest_tokens // ratio
        device = segments.start_S.device
        segment_SE = torch.arange(len(batch.segments), device=device).unsqueeze(1)
        ordinal_SE = torch.arange(most, device=device).expand(len(batch.segments), -1)
        held_SE = ordinal_SE < segments.stop_S.unsqueeze(1) // ratio
        return cls(
            row_SE=physical_rows(
                component,
                segments.tables,
                segment_SE.expand_as(ordinal_SE),
                torch.where(held_SE, ordinal_SE, 0),
            ),
            segment_T=segments.segment_T,
            visible_T=(segments.position_T + 1) // ratio,
            closing_row_M=physical_rows(component, segments.tables, tail.segment_M, tail.ordinal_M),
            rectangles=_rectangles(batch),
        )

    @property
    def num_entries(self) -> int:
        return self.row_SE.shape[1]


def _ragged(count_S: Tensor) -> tuple[Tensor, Tensor]:
    """(segment, step within it) of each of ``sum(count_S)`` rows laid end to end."""
    segment = torch.repeat_interleave(count_S)
    offset_S = count_S.cumsum(0) - count_S
    return segment, torch.arange(len(segment), device=count_S.device) - offset_S[segment]


def _rectangles(batch: ForwardBatch) -> tuple[Rectangle, ...]:
    lengths = [len(segment.token_ids) for segment in batch.segments]
    rectangles, first_segment, first_token = [], 0, 0
    for length, run in groupby(lengths):
        count = len(list(run))
        rectangles.append(
            Rectangle(
                slice(first_segment, first_segment + count),
                slice(first_token, first_token + count * length),
                length,
            )
        )
        first_segment, first_token = first_segment + count, first_token + count * length
    return tuple(rectangles)
