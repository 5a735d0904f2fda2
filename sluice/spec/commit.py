"""Committing a verify step. State addressed by position is rolled back by a shorter length; recurrent
state is not touched by a verify at all, and moves on only when it is committed.

By length: every row that a rejected draft wrote lies at or above the new length and is written again
at its own position before anything reads it (``deepseek_v4_model`` reference, 4.3).

Recurrent: SGLang's DSPARK worker once never committed, and nobody noticed but the accuracy
(``kimi_dspark_dcp`` reference, 3.3). Here the need is read off the declared state, the contract is a
base class without defaults, an open verify stops the next forward, and every forward compares how
many tokens the state has taken in with where it continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from sluice.config import SpecConfig
from sluice.errors import ConfigError, IllegalTransition, InternalError
from sluice.layout.component import Component, Coverage, Kind, Owner
from sluice.models.base import ForwardBatch, TargetModel
from sluice.models.capture import HiddenCapture, ReadableTarget
from sluice.models.recurrent import PendingVerify, RecurrentTarget, check_contract
from sluice.models.snapshots import SnapshotGrid
from sluice.pools.backup import EarlierState
from sluice.pools.base import RequestTables, StateMemory


def commit_by_length(tables: RequestTables, start: int, accepted: int) -> None:
    """After verifying tokens at ``start ..`` of which ``accepted`` drafts stand: ``start + accepted
    + 1`` are kept.
    """
    assert start == tables.kv_len, "a verify step starts where the committed state ends"
    tables.kv_len = start + accepted + 1


def check_chain(spec: SpecConfig) -> None:
    """Raises ``ConfigError`` for a tree of drafts."""
    if spec.topk != 1:
        raise ConfigError(
            f"topk is {spec.topk}: a tree of drafts can't be verified, since the accepted rows of a "
            f"tree aren't its first ones and nothing says which states to commit",
            stage="start",
            remedy="draft chains: topk = 1",
        )


def needs_commit(components: Sequence[Component]) -> bool:
    """Whether the target keeps a state of its newest token only, which no shorter length undoes."""
    return any(c.owner is Owner.TARGET and c.coverage is Coverage.LAST for c in components)


class CommittedTarget:
    """A target whose verified state is settled before it computes anything else.

    ``forward`` -> ``commit`` or ``discard``, in turn. Without recurrent state (or drafts) there is
    nothing to settle, and ``commit`` does nothing.
    """

    def __init__(
        self, target: TargetModel, memory: StateMemory, grid: SnapshotGrid | None = None
    ) -> None:
        """``grid``: depths at which recurrent state is wanted for reuse.

        Raises ``ConfigError`` when the state needs a commit and the model doesn't declare one.
        """
        components = memory.components()
        check_contract(target, components)
        self._target = target
        self._memory = memory
        self._recurrent = _declared(target) if needs_commit(components) else None
        self._lengths = tuple(c for c in components if c.kind is Kind.STATE_LENGTH)
        self._pending: PendingVerify | None = None
        self._grid = grid
        self._starts: tuple[int, ...] = ()  # of the verified segments
        if self._recurrent is not None and not self._lengths:
            raise ConfigError(
                f"{target.info.architecture} keeps recurrent state, but no "
                f"{Kind.STATE_LENGTH.value} beside it to check it by",
                stage="start",
                remedy="declare how many tokens the state has taken in as a component",
            )

    def forward(
        self, batch: ForwardBatch, num_verify: int, capture: HiddenCapture | None = None
    ) -> Tensor:
        """Run the batch; its first ``num_verify`` segments are drafts that may be rejected.

        Raises ``IllegalTransition`` while an earlier verify is open, ``InternalError`` where a
        segment doesn't continue at the length of its recurrent state.
        """
        if self._pending is not None:
            raise IllegalTransition(
                "forward while a verify is open: its recurrent state was neither committed nor "
                "discarded",
                stage="forward",
            )
        self._check_lengths(batch)
        if self._recurrent is not None and num_verify:
            self._starts = tuple(segment.start for segment in batch.segments[:num_verify])
            hidden, self._pending = self._recurrent.verify(batch, self._memory, num_verify, capture)
            return hidden
        if capture is None:
            return self._target.forward(batch, self._memory)
        return cast(ReadableTarget, self._target).forward(batch, self._memory, capture)

    def commit(self, accepted: Sequence[int]) -> tuple[EarlierState | None, ...]:
        """Settle a verify: of each verified segment the known token and ``accepted`` drafts stand.

        Returns each segment's recurrent state at the depth of the grid that its accepted tokens reach
        or pass, None where they don't; empty when there was nothing to settle.
        """
        if self._pending is None:
            return ()
        pending, self._pending = self._pending, None
        commit_lens = [count + 1 for count in accepted]
        try:
            reached = tuple(self._reached(pending, row, n) for row, n in enumerate(commit_lens))
        except BaseException:
            pending.discard()
            raise
        pending.commit(commit_lens)
        assert not pending.is_open, "commit closes a verify"
        return reached

    def _reached(self, pending: PendingVerify, row: int, commit_len: int) -> EarlierState | None:
        """Which tokens were rejected is known only here: a depth among those must never be kept."""
        if self._grid is None:
            return None
        crossing = self._grid.crossing(self._starts[row], commit_len)
        if crossing is None:
            return None
        return EarlierState(crossing.depth, pending.state_after(row, crossing.tokens))

    def discard(self) -> None:
        """Settle a verify whose outcome isn't known: the state stays as it was."""
        if self._pending is not None:
            self._pending.discard()
            self._pending = None

    def _check_lengths(self, batch: ForwardBatch) -> None:
        """A prompt's first tokens find whatever the slot held; everybody else continues."""
        for component in self._lengths:
            buffer = self._memory.buffer(component.name, component.entries[0].layer_id)
            stored = buffer[batch.tables.slots_S, 0].tolist()
            for segment, state_len in zip(batch.segments, stored, strict=True):
                if segment.start > 0 and not segment.start == segment.tables.kv_len == state_len:
                    raise InternalError(
                        f"request {segment.tables.request_id} (slot {segment.tables.slot}) goes on at "
                        f"{segment.start} with kv_len {segment.tables.kv_len}, but its recurrent "
                        f"state has taken in {state_len} tokens ({component.name})",
                        stage="forward",
                        remedy="commit every verify, at the accepted length",
                    )


def _declared(target: TargetModel) -> RecurrentTarget:
    """The contract is a base class, so that a wrapper that doesn't hand it on can't look as if."""
    if not isinstance(target, RecurrentTarget):
        raise ConfigError(
            f"{target.info.architecture} keeps state of the newest token only, but "
            f"{type(target).__name__} does not implement RecurrentTarget",
            stage="start",
            remedy="derive the model, and every wrapper around it, from RecurrentTarget",
        )
    return target
