"""Verified rows of a Kimi Linear batch, and how their recurrent state is moved on afterwards.

Kept per row: the raw convolution rows (in the batch's workspace anyway) and each token's write to the
state. Commit *replays* the accepted writes with the operations that verifying used, so the bits are
those of a plain decode.

The alternative keeps a copy of the state after every token. Measured for one layer of the published
size, one request, blocks of 8, plain torch on one CPU core: copies add 3 ms to a scan of 45 ms and
commit in 2 ms, where replaying n tokens takes about 5n ms more. But they hold 16 MiB a layer, 331 MiB a
request, where the writes and rows kept here are 0.6 MiB and 12 MiB: room for eight more requests, for
each one that verifies. A fused kernel is bound by memory traffic, and there a replay (read a state,
write a state) also moves less than writing eight copies. For small models a commit is about a tenth of
its verify.

Shape legend: L recurrent layers, R verified rows, N tokens of the longest one, W - 1 columns,
H heads, K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from sluice.errors import IllegalTransition, InternalError
from sluice.models.base import Segment
from sluice.models.kimi_linear.delta import Writes, scan
from sluice.models.kimi_linear.kda import KdaBuffers, KdaTrace, start_states, write_columns
from sluice.models.kimi_linear.plan import StatePlan, workspace_rows
from sluice.models.kimi_linear.state import CONV, LENGTH, RECURRENT, UNSETTLED
from sluice.models.recurrent import PendingVerify
from sluice.pools.backup import ComponentBackup, newest_row

# Layers are replayed together, in blocks of about this many state values.
_VALUES_A_REPLAY = 1 << 26


class _Status(Enum):
    OPEN = "open"
    COMMITTED = "committed"
    DISCARDED = "discarded"


@dataclass(frozen=True)
class _Layer:
    buffers: KdaBuffers
    trace: KdaTrace


class KimiPendingVerify(PendingVerify):
    """``models.recurrent.PendingVerify`` over the slots of one memory."""

    def __init__(
        self,
        segments: Sequence[Segment],
        plan: StatePlan,
        layers: Sequence[tuple[KdaBuffers, KdaTrace]],
        length_buffer: Tensor,
        layer_ids: Sequence[int],
    ) -> None:
        self._status = _Status.OPEN
        self._segments = tuple(segments[: plan.num_verify])
        # By value: a request that ends in between takes its slot number with it.
        self._slots = tuple(segment.tables.slot for segment in self._segments)
        self._plan = plan
        self._layers = tuple(_Layer(*layer) for layer in layers)
        self._length_buffer = length_buffer
        self._layer_ids = tuple(layer_ids)
        firsts, at = [], 0
        for segment in segments:
            firsts.append(at)
            at += len(segment.token_ids)
        self._first_S = torch.tensor(firsts, device=length_buffer.device)

    @property
    def is_open(self) -> bool:
        return self._status is _Status.OPEN

    def commit(self, commit_lens: Sequence[int]) -> None:
        self._check_open("commit")
        self._check_lengths(commit_lens)
        rows = [row for row, count in enumerate(commit_lens) if count > 0]
        if rows:
            self._write(rows, [commit_lens[row] for row in rows])
        self._status = _Status.COMMITTED

    def discard(self) -> None:
        self._check_open("discard")
        self._status = _Status.DISCARDED

    def state_after(self, row: int, tokens: int) -> tuple[ComponentBackup, ...]:
        states = self.states(row, tokens)
        length = self._length_buffer.new_tensor([self._segments[row].start + tokens])
        return (
            newest_row(CONV, self._layer_ids, self.columns(row, tokens)),
            newest_row(RECURRENT, self._layer_ids, states),
            newest_row(LENGTH, self._layer_ids[:1], (length,)),
        )

    def states(self, row: int, count: int) -> tuple[Tensor, ...]:
        """Each layer's recurrent state after the row's first ``count`` tokens, ``[H, K, V]``."""
        self._check_open("states")
        if not 0 <= count <= len(self._segments[row].token_ids):
            raise InternalError(f"row {row} has no state after {count} tokens", stage="commit")
        return tuple(states_RHKV[0] for states_RHKV in self._replay([row], [count]))

    def columns(self, row: int, count: int) -> tuple[Tensor, ...]:
        """Each layer's convolution columns after the row's first ``count`` tokens, ``[H, W - 1, c]``."""
        window_RW = self._windows([row], [count])
        heads = self._layers[0].buffers.conv.shape[1]
        return tuple(
            layer.trace.workspace[window_RW[0]].unflatten(-1, (heads, -1)).transpose(0, 1)
            for layer in self._layers
        )

    def _check_open(self, what: str) -> None:
        if not self.is_open:
            raise IllegalTransition(
                f"{what} of a verify that is {self._status.value} already", stage="commit"
            )

    def _check_lengths(self, commit_lens: Sequence[int]) -> None:
        if len(commit_lens) != len(self._segments):
            raise InternalError(
                f"{len(commit_lens)} commit lengths for {len(self._segments)} verified rows",
                stage="commit",
            )
        for row, (segment, count) in enumerate(zip(self._segments, commit_lens, strict=True)):
            if not -1 <= count <= len(segment.token_ids):
                raise InternalError(
                    f"row {row}: {count} tokens to commit, {len(segment.token_ids)} were verified",
                    stage="commit",
                )
            if count > 0 and segment.tables.slot != self._slots[row]:
                raise InternalError(
                    f"row {row}: request {segment.tables.request_id} no longer holds slot "
                    f"{self._slots[row]}",
                    stage="commit",
                    remedy="commit before the request gives its state back, or pass -1 for its row",
                )

    def _write(self, rows: list[int], counts: list[int]) -> None:
        device = self._length_buffer.device
        slot_R = torch.tensor([self._slots[row] for row in rows], device=device)
        window_RW = self._windows(rows, counts)
        states = self._replay(rows, counts)
        self._length_buffer[slot_R, 0] = UNSETTLED
        for layer, state_RHKV in zip(self._layers, states, strict=True):
            layer.buffers.recurrent.index_copy_(0, slot_R, state_RHKV)
            write_columns(layer.trace.workspace, window_RW, slot_R, layer.buffers.conv)
        starts = [self._segments[row].start for row in rows]
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        self._length_buffer[slot_R, 0] = torch.tensor(lengths, device=device)

    def _windows(self, rows: list[int], counts: list[int]) -> Tensor:
        """Workspace rows of the columns that ``counts`` tokens leave behind, ``[R, W - 1]``."""
        device = self._length_buffer.device
        columns = self._plan.window_SW.shape[1]
        row_R1 = torch.tensor(rows, device=device).unsqueeze(1)
        index_RW = torch.tensor(counts, device=device).unsqueeze(1) + torch.arange(
            columns, device=device
        )
        return workspace_rows(row_R1, index_RW, self._first_S, columns)

    def _replay(self, rows: list[int], counts: list[int]) -> list[Tensor]:
        """Each layer's state of some rows after some of their tokens, ``[R, H, K, V]`` each."""
        device = self._length_buffer.device
        row_R = torch.tensor(rows, device=device)
        steps = max(counts)
        count_R1 = torch.tensor(counts, device=device).unsqueeze(1)
        real_RN = torch.arange(steps, device=device) < count_R1
        states: list[Tensor] = []
        size = len(rows) * self._layers[0].buffers.recurrent[0].numel()
        block = max(1, _VALUES_A_REPLAY // size)
        for first in range(0, len(self._layers), block):
            some = self._layers[first : first + block]
            start = [start_states(self._plan, row_R, layer.buffers.recurrent) for layer in some]
            writes = _stacked([layer.trace.writes[row_R] for layer in some], steps)
            real = real_RN.repeat(len(some), 1)
            ended, _ = scan(torch.cat(start), writes.only(real), None)
            states += ended.split(len(rows))
        return states


def _stacked(layers: Sequence[Writes], steps: int) -> Writes:
    """The first ``steps`` writes of several layers' rows, layers outermost: ``[L*R, N]``."""
    return Writes(
        k=torch.cat([one.k[:, :steps] for one in layers]),
        v=torch.cat([one.v[:, :steps] for one in layers]),
        g=torch.cat([one.g[:, :steps] for one in layers]),
        beta=torch.cat([one.beta[:, :steps] for one in layers]),
    )
