"""A pod with a budget of bytes takes no more: pages, slots and the staging that its I/O thread takes at start."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.config import EngineConfig, PoolConfig
from sluice.engine.build import build_engine
from sluice.transfer.loopback import LoopbackFabric, LoopbackPlane
from sluice.transfer.worker import TransferWorker
from sluice.transfer.writes import GROUP_BYTES
from sluice.types import Role

MODEL = Path(__file__).parents[2] / "models" / "tiny-kimi"
ROUNDING_BYTES = 4096  # buffers are aligned


@pytest.mark.parametrize("budget", [20 << 20, 80 << 20])
def test_prefill_counts_its_staging(budget: int) -> None:
    pool = PoolConfig(num_slots=8, budget_bytes=budget)
    arenas = {}
    for role in (Role.PREFILL, Role.DECODE):
        memory = build_engine(MODEL, role, pool, None, EngineConfig()).memory
        arenas[role] = memory.arena().numel()
        if role is Role.PREFILL:
            worker = TransferWorker(LoopbackPlane(LoopbackFabric(), "prefill"))
            worker.start(memory.arena(), memory.regions())
            staged = worker.staging().total * GROUP_BYTES
            worker.close()
    assert staged == max(1, budget // (8 * GROUP_BYTES)) * GROUP_BYTES
    assert arenas[Role.PREFILL] + staged <= budget + ROUNDING_BYTES
    page = 168 << 10
    assert arenas[Role.DECODE] - arenas[Role.PREFILL] in range(staged - page, staged + page)
