"""Index tensors of one batch, shared by all layers of a kind.

Segments fall into *groups* that are computed in one go: all that take the recurrence step by step
(verified ones, then those of one token) side by side in one padded rectangle, and every longer
chunk alone. Verified segments read the state they start from; only the others move it on.

Shape legend: T tokens, S segments, W convolution taps (W - 1 columns of state), R rows of a group,
N steps of its longest row, U tokens of a group, E keys (of the longest row). Index tensors are int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.layout.component import Component
from sluice.models.base import ForwardBatch, Segment
from sluice.parallel.context import own_lengths
from sluice.pools.rows import physical_rows

# Attention takes keys in blocks of one size, so that verifying a token and decoding it alone give the
# same bits although the former gathers more keys.
KEY_BLOCK = 128


@dataclass(frozen=True)
class Group:
    """Rows computed side by side. Padded places of ``token_RN`` repeat the row's first token."""

    segment_R: Tensor
    token_RN: Tensor
    real_RN: Tensor  # bool
    token_U: Tensor  # the batch's tokens in this group, row by row
    place_U: Tensor  # where they are in the flattened rectangle
    stop: int  # end of the positions of the row that reaches furthest
    stepwise: bool  # the recurrence token by token; otherwise one row, in chunks

    def gather(self, x_RN: Tensor) -> Tensor:
        """What a rectangle ``[R, N, ...]`` holds for the batch's tokens: ``[U, ...]``."""
        return x_RN.flatten(0, 1)[self.place_U]


@dataclass(frozen=True)
class StatePlan:
    """What the recurrent layers share.

    The convolution reads a *workspace*: each segment's W - 1 columns of state, then the batch's rows.
    """

    num_verify: int  # the first segments of the batch; also the first rows of the first group
    slot_S: Tensor
    fresh_S: Tensor  # bool: nothing came before, whatever the slot holds
    source_TW: Tensor  # workspace rows of each token's taps, oldest first
    window_SW: Tensor  # workspace rows of the W - 1 columns left behind by each whole segment
    stop_S: Tensor
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Keys:
    """Latent rows that a group's queries see; a shorter row's surplus repeats its position 0."""

    group: Group
    row_RE: Tensor  # physical rows
    visible_RNE: Tensor
    # Of dealt keys: this rank has the row at all; other rows hold anything.
    held_RE: Tensor | None = None


@dataclass(frozen=True)
class Lengths:
    """How many keys each query of a group sees: ``seen_RN`` of the whole request, of which ``own_RN`` are on
    this rank, and are its first.
    """

    seen_RN: Tensor
    own_RN: Tensor


@dataclass(frozen=True)
class LatentPlan:
    """What the attention layers share. Rows are written first, then gathered.

    Of a history that is dealt to several ranks, tokens ``own_W`` of the batch are this one's to write, and
    keys are those that it holds.
    """

    written_row_T: Tensor
    keys: tuple[Keys, ...]
    own_W: Tensor | None = None  # None: all of them


def groups_of(batch: ForwardBatch, num_verify: int) -> tuple[Group, ...]:
    """The step-by-step group, if there is one, then one group a longer chunk."""
    device = batch.positions_T.device
    segments, firsts = batch.segments, _first_tokens(batch.segments)
    stepwise = [
        i for i, segment in enumerate(segments) if i < num_verify or len(segment.token_ids) == 1
    ]
    groups = [_group(segments, firsts, stepwise, True, device)] if stepwise else []
    groups += [
        _group(segments, firsts, [i], False, device)
        for i in range(len(segments))
        if i not in set(stepwise)
    ]
    return tuple(groups)


def state_plan(
    batch: ForwardBatch, groups: tuple[Group, ...], num_verify: int, conv_width: int
) -> StatePlan:
    device, segments = batch.positions_T.device, batch.segments
    starts = torch.tensor([segment.start for segment in segments], device=device)
    stops = torch.tensor([segment.stop for segment in segments], device=device)
    first_S = torch.tensor(_first_tokens(segments), device=device)
    columns = conv_width - 1
    step_T = batch.positions_T - starts[batch.segment_T]
    taps_W = torch.arange(conv_width, device=device)
    segment_S1 = torch.arange(len(segments), device=device).unsqueeze(1)
    return StatePlan(
        num_verify=num_verify,
        slot_S=batch.tables.slots_S,
        fresh_S=starts == 0,
        source_TW=workspace_rows(
            batch.segment_T.unsqueeze(1), step_T.unsqueeze(1) + taps_W, first_S, columns
        ),
        window_SW=workspace_rows(
            segment_S1, (stops - starts).unsqueeze(1) + taps_W[:-1], first_S, columns
        ),
        stop_S=stops,
        groups=groups,
    )


def workspace_rows(segment: Tensor, index: Tensor, first_S: Tensor, columns: int) -> Tensor:
    """Workspace row of item ``index`` in (a segment's columns of state, then its rows)."""
    in_batch = len(first_S) * columns + first_S[segment] + index - columns
    return torch.where(index < columns, segment * columns + index, in_batch)


def latent_plan(
    batch: ForwardBatch, groups: tuple[Group, ...], component: Component, context_rank: int = 0
) -> LatentPlan:
    """``context_rank``: which of the ranks that ``component`` is dealt to this one is."""
    row_T = physical_rows(component, batch.tables, batch.segment_T, batch.positions_T)
    keys = tuple(_keys(batch, group, component, context_rank) for group in groups)
    ranks = component.interleave
    if ranks == 1:
        return LatentPlan(row_T, keys)
    own_W = (row_T % ranks == context_rank).nonzero().squeeze(1)
    return LatentPlan(row_T[own_W] // ranks, keys, own_W)


def lengths_of(position_RN: Tensor, ranks: int, rank: int) -> Lengths:
    """A token sees itself and what came before, whether it is decoded alone or verified. Drafted tokens
    are tokens of their segment with positions of their own, so their number is added to no length.
    """
    seen_RN = position_RN + 1
    return Lengths(seen_RN, own_lengths(seen_RN, ranks, rank))


def _keys(batch: ForwardBatch, group: Group, component: Component, context_rank: int) -> Keys:
    """A dealt page begins at a multiple of the ranks: this rank's key number e is token e * ranks + rank."""
    device, ranks = batch.positions_T.device, component.interleave
    lengths = lengths_of(batch.positions_T[group.token_RN], ranks, context_rank)
    blocks = -(-group.stop // (KEY_BLOCK * ranks))  # as many on every rank
    key_E = torch.arange(blocks * KEY_BLOCK, device=device)
    held_RE = key_E < lengths.own_RN.amax(dim=1, keepdim=True)
    row_RE = physical_rows(
        component,
        batch.tables,
        group.segment_R.unsqueeze(1),
        torch.where(held_RE, key_E * ranks + context_rank, 0),
    )
    return Keys(
        group=group,
        row_RE=row_RE // ranks if ranks > 1 else row_RE,
        visible_RNE=key_E < lengths.own_RN.unsqueeze(-1),
        held_RE=held_RE if ranks > 1 else None,
    )


def _group(
    segments: Sequence[Segment],
    firsts: Sequence[int],
    chosen: Sequence[int],
    stepwise: bool,
    device: torch.device,
) -> Group:
    lengths = [len(segments[i].token_ids) for i in chosen]
    width = max(lengths)
    rows = list(zip([firsts[i] for i in chosen], lengths, strict=True))
    token_RN = [
        [first + step if step < length else first for step in range(width)]
        for first, length in rows
    ]
    return Group(
        segment_R=torch.tensor(chosen, device=device),
        token_RN=torch.tensor(token_RN, device=device),
        real_RN=torch.tensor(
            [[step < length for step in range(width)] for length in lengths], device=device
        ),
        token_U=torch.tensor(
            [first + step for first, length in rows for step in range(length)], device=device
        ),
        place_U=torch.tensor(
            [row * width + step for row, length in enumerate(lengths) for step in range(length)],
            device=device,
        ),
        stop=max(segments[i].stop for i in chosen),
        stepwise=stepwise,
    )


def _first_tokens(segments: Sequence[Segment]) -> list[int]:
    firsts, at = [], 0
    for segment in segments:
        firsts.append(at)
        at += len(segment.token_ids)
    return firsts
