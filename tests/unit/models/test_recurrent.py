"""The start-up check: recurrent state needs a model that can commit it, however it is wrapped."""

from __future__ import annotations

import pytest
from torch import Tensor

from sluice.config import PoolConfig
from sluice.errors import ConfigError
from sluice.models.base import ForwardBatch, ModelInfo
from sluice.models.recurrent import check_contract, has_recurrent_state
from sluice.pools.base import BufferSpec, StateMemory
from sluice.pools.memory import build_memory
from tests.unit.models.kimi_linear.tiny import tiny_target

TARGET = tiny_target()
MEMORY = build_memory(
    TARGET.state_needs("float32"), PoolConfig(page_tokens=16, num_pages=2, num_slots=1), 1
)


class Wrapper:
    """Hands everything of a ``TargetModel`` on, has the hook too, and promises nothing."""

    def __init__(self, inner: object) -> None:
        self.verify = getattr(inner, "verify", None)

    @property
    def info(self) -> ModelInfo:
        return TARGET.info

    def state_needs(self, kv_dtype: str) -> tuple[BufferSpec, ...]:
        return TARGET.state_needs(kv_dtype)

    def forward(self, batch: ForwardBatch, memory: StateMemory) -> Tensor:
        return TARGET.forward(batch, memory)

    def logits(self, hidden: Tensor) -> Tensor:
        return TARGET.logits(hidden)


def test_the_need_comes_from_what_is_stored() -> None:
    assert has_recurrent_state(MEMORY.components())
    paged = [c for c in MEMORY.components() if c.name == "target.mla"]
    assert not has_recurrent_state(paged)
    check_contract(Wrapper(TARGET), paged)


def test_the_model_itself_is_accepted() -> None:
    check_contract(TARGET, MEMORY.components())


def test_a_hook_hidden_behind_a_wrapper_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"kda\.conv, kda\.recurrent.*Wrapper does not"):
        check_contract(Wrapper(TARGET), MEMORY.components())
