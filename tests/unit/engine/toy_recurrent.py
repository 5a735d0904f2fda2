"""The toy model with recurrent state beside its pages: what it says next depends on every token so far,
through numbers that no shorter length can roll back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.config import EngineConfig, PoolMode, SpecConfig
from sluice.engine.core import EngineCore
from sluice.errors import IllegalTransition
from sluice.layout.component import Coverage, Kind, Owner
from sluice.models.base import DraftModel, ForwardBatch, Segment
from sluice.models.capture import HiddenCapture
from sluice.models.recurrent import PendingVerify, RecurrentTarget
from sluice.pools.backup import ComponentBackup, newest_row
from sluice.pools.base import BufferSpec, StateMemory
from sluice.pools.memory import build_memory
from sluice.types import Role
from tests.unit.engine.toy_model import TARGET_NEEDS, ToyDraft, ToyTarget, mix, pool_config

COLUMNS = 3


def _slot(name: str, kind: Kind, width: int, dtype: str = "float32") -> BufferSpec:
    return BufferSpec(name, Owner.TARGET, kind, Coverage.LAST, 1, 0, (0,), dtype, (width,))


CONV = _slot("kda.conv", Kind.KDA_CONV, COLUMNS)
RECURRENT = _slot("kda.recurrent", Kind.KDA_RECURRENT, 1)
LENGTH = _slot("kda.length", Kind.STATE_LENGTH, 1, "int64")


@dataclass(frozen=True)
class State:
    """After some tokens: the last three, and a fold of all of them."""

    conv: tuple[int, ...] = (0,) * COLUMNS
    folded: int = 0

    def after(self, token: int) -> State:
        return State((*self.conv[1:], token), mix(self.folded, token))


def fold(tokens: Sequence[int]) -> State:
    state = State()
    for token in tokens:
        state = state.after(token)
    return state


class Slots:
    """The three components of one memory, by slot."""

    def __init__(self, memory: StateMemory) -> None:
        self.conv, self.recurrent, self.length = (
            memory.buffer(spec.name, 0) for spec in (CONV, RECURRENT, LENGTH)
        )

    def read(self, slot: int) -> State:
        """Raises for NaN."""
        conv = tuple(int(value) for value in self.conv[slot].tolist())
        return State(conv, int(float(self.recurrent[slot, 0])))

    def write(self, slot: int, state: State, length: int) -> None:
        self.conv[slot] = torch.tensor(state.conv, dtype=torch.float32)
        self.recurrent[slot, 0] = state.folded
        self.length[slot, 0] = length


class ToyPending(PendingVerify):
    """``states[row][i]`` is the state after ``i + 1`` tokens of the row."""

    def __init__(
        self, slots: Slots, segments: Sequence[Segment], states: Sequence[Sequence[State]]
    ) -> None:
        self._slots, self._segments, self._states = slots, segments, states
        self._open = True

    @property
    def is_open(self) -> bool:
        return self._open

    def commit(self, commit_lens: Sequence[int]) -> None:
        self._close()
        for segment, states, count in zip(self._segments, self._states, commit_lens, strict=True):
            if count > 0:
                self._write(segment, states[count - 1], segment.start + count)

    def state_after(self, row: int, tokens: int) -> tuple[ComponentBackup, ...]:
        state, length = self._states[row][tokens - 1], self._segments[row].start + tokens
        return (
            newest_row(CONV.name, (0,), (torch.tensor(state.conv, dtype=torch.float32),)),
            newest_row(RECURRENT.name, (0,), (torch.tensor([float(state.folded)]),)),
            newest_row(LENGTH.name, (0,), (torch.tensor([length]),)),
        )

    def discard(self) -> None:
        self._close()

    def _write(self, segment: Segment, state: State, length: int) -> None:
        self._slots.write(segment.tables.slot, state, length)

    def _close(self) -> None:
        if not self._open:
            raise IllegalTransition("this verify is closed already")
        self._open = False


class RecurrentToy(ToyTarget, RecurrentTarget):
    pending = ToyPending

    def state_needs(self, kv_dtype: str) -> tuple[BufferSpec, ...]:
        return (*TARGET_NEEDS, CONV, RECURRENT, LENGTH)

    def forward(
        self, batch: ForwardBatch, memory: StateMemory, capture: HiddenCapture | None = None
    ) -> Tensor:
        hidden, _ = self._run(batch, memory, 0)
        return hidden

    def verify(
        self,
        batch: ForwardBatch,
        memory: StateMemory,
        num_verify: int,
        capture: HiddenCapture | None = None,
    ) -> tuple[Tensor, PendingVerify]:
        hidden, states = self._run(batch, memory, num_verify)
        return hidden, self.pending(Slots(memory), batch.segments[:num_verify], states[:num_verify])

    def _run(
        self, batch: ForwardBatch, memory: StateMemory, num_verify: int
    ) -> tuple[Tensor, list[list[State]]]:
        hidden = super().forward(batch, memory)
        slots = Slots(memory)
        states = [_states(slots, segment) for segment in batch.segments]
        for segment, after in list(zip(batch.segments, states, strict=True))[num_verify:]:
            slots.write(segment.tables.slot, after[-1], segment.stop)
        flat = [state for after in states for state in after]
        mixed = [mix(int(h), s.folded, *s.conv) for h, s in zip(hidden[:, 0], flat, strict=True)]
        return torch.stack([torch.tensor(mixed).float(), hidden[:, 1]], dim=1), states


def _states(slots: Slots, segment: Segment) -> list[State]:
    state = State() if segment.start == 0 else slots.read(segment.tables.slot)
    after = []
    for token in segment.token_ids:
        state = state.after(token)
        after.append(state)
    return after


def recurrent_core(
    role: Role = Role.AGGREGATED,
    mode: PoolMode = PoolMode.PAGED,
    *,
    steps: int = 3,
    draft: DraftModel | None = None,
    target: ToyTarget | None = None,
    config: EngineConfig | None = None,
    spec: SpecConfig | None = None,
) -> EngineCore:
    """As ``toy_core``."""
    target, draft, spec = target or RecurrentToy(), draft or ToyDraft(), spec or SpecConfig(steps)
    pool = pool_config(mode, num_slots=20)
    needs = (*target.state_needs(pool.kv_dtype), *draft.state_needs(pool.kv_dtype))
    memory = build_memory(needs, pool, spec.verify_tokens)
    return EngineCore(
        role, target, draft if spec.steps else None, memory, spec, config or EngineConfig(), pool
    )
