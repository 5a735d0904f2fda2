"""The toy model and draft with every row kept until the request ends: nothing to copy, pages only."""

from __future__ import annotations

from torch import Tensor

from sluice.config import EngineConfig, PoolMode
from sluice.engine.core import EngineCore
from sluice.layout.component import Coverage, Kind, Owner
from sluice.models.base import DraftModel
from sluice.pools.base import BufferSpec
from sluice.types import Role
from tests.unit.engine.toy_model import (
    DRAFT_NEEDS,
    TARGET_NEEDS,
    ToyDraft,
    ToyTarget,
    mix,
    toy_core,
)


def _rows(name: str, owner: Owner) -> BufferSpec:
    return BufferSpec(name, owner, Kind.KV, Coverage.HISTORY, 1, 0, (0,), "float32", (1,))


class HistoryToy(ToyTarget):
    def state_needs(self, kv_dtype: str) -> tuple[BufferSpec, ...]:
        rows = (_rows(name, Owner.TARGET) for name in ("target.swa", "target.tail"))
        return (TARGET_NEEDS[0], *rows)


class HistoryDraft(ToyDraft):
    def state_needs(self, kv_dtype: str) -> tuple[BufferSpec, ...]:
        return (_rows("draft.swa", Owner.DRAFT), DRAFT_NEEDS[1])

    def row(self, hidden_D: Tensor, token: int) -> int:
        """As DSPARK's: of one position alone. Rows that know the next token couldn't be shared."""
        return mix(*hidden_D.int().tolist())


def history_core(
    role: Role = Role.AGGREGATED,
    mode: PoolMode = PoolMode.PAGED,
    *,
    steps: int = 3,
    draft: DraftModel | None = None,
    target: ToyTarget | None = None,
    config: EngineConfig | None = None,
) -> EngineCore:
    """As ``toy_core``."""
    return toy_core(
        role,
        mode,
        steps=steps,
        draft=draft or HistoryDraft(),
        target=target or HistoryToy(),
        config=config,
    )
