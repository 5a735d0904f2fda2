"""Conversations on every family: each turn starts behind what the one before left, prompt and answer, and
says what it would have said cold, in tokens and accepted counts of every step.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sluice.config import EngineConfig, PoolConfig, PoolMode, SpecConfig
from sluice.engine.core import EngineCore
from sluice.models.base import DraftModel, TargetModel
from sluice.models.dspark.model import DSparkDraft
from sluice.models.registry import load_model
from sluice.pools.memory import build_memory
from sluice.spec.build import own_steps
from sluice.types import Request, RequestId, Role, Sampling
from tests.unit.engine.driving import Story, run_all, run_until_idle, tell
from tests.unit.models.dspark.tiny import make_pair

MODELS = Path(__file__).parents[2] / "models"
Parts = tuple[TargetModel, DraftModel | DSparkDraft | None]


@functools.cache
def _shipped(name: str) -> Parts:
    model = load_model(MODELS / name)
    return model.target, model.draft


@functools.cache
def _qwen3() -> Parts:
    pair = make_pair()
    return pair.target, pair.draft


@dataclass(frozen=True)
class Family:
    """A model, and sizes at which an answer crosses several depths."""

    name: str
    parts: Callable[[], Parts]
    interval: int  # and a page
    first: int  # tokens of the first prompt
    answer: int
    lost: int  # the most of a turn's beginning that is not reused: less than an interval, and a draft's window
    mode: PoolMode = PoolMode.PAGED
    variants: tuple[bool, ...] = (True, False)  # with a draft, and without

    def __str__(self) -> str:
        return f"{self.name}-{self.mode.value}"

    def core(self, prefix_bytes: int, *, drafts: bool) -> EngineCore:
        target, draft = self.parts()
        steps = own_steps(draft) if drafts else 0
        spec = SpecConfig(steps)
        pool = PoolConfig(
            mode=self.mode,
            page_tokens=self.interval,
            num_pages=24,
            num_window_pages=24,
            num_slots=2,
            fill="nan",
        )
        needs = target.state_needs(pool.kv_dtype)
        if draft is not None and drafts:
            needs += draft.state_needs(pool.kv_dtype)
        memory = build_memory(needs, pool, spec.verify_tokens)
        config = EngineConfig(
            max_batch_tokens=100,
            prefix_bytes=prefix_bytes,
            prefix_interval_tokens=self.interval,
        )
        used = draft if drafts else None
        return EngineCore(Role.AGGREGATED, target, used, memory, spec, config, pool)


FAMILIES = [
    Family("tiny-dsv4", lambda: _shipped("tiny-dsv4"), 128, 350, 45, 128 + 32),
    Family(
        "tiny-dsv4",
        lambda: _shipped("tiny-dsv4"),
        128,
        350,
        45,
        128 + 32,
        PoolMode.UNIFIED,
        (True,),
    ),
    Family("tiny-kimi", lambda: _shipped("tiny-kimi"), 32, 70, 60, 32),
    Family("qwen3", _qwen3, 16, 40, 40, 16),
]


@pytest.mark.parametrize(
    ("family", "drafts"),
    [(family, drafts) for family in FAMILIES for drafts in family.variants],
    ids=str,
)
def test_each_turn_says_what_it_would_have_said_cold(family: Family, drafts: bool) -> None:
    warm, cold = (family.core(size, drafts=drafts) for size in (1 << 28, 0))
    rng = random.Random(family.name)
    vocab = min(500, warm.info.vocab_size)
    history = tuple(rng.randrange(3, vocab) for _ in range(family.first))
    for turn in range(3):
        sampling = Sampling(
            max_tokens=family.answer, temperature=0.7 * (turn % 2), seed=turn, ignore_eos=True
        )
        one = Request(RequestId(f"turn-{turn}"), history, sampling)
        warm.submit(one)
        warm.step()
        reused = warm._requests[one.request_id].cached_tokens
        stories: dict[RequestId, Story] = {}
        tell(stories, run_until_idle(warm))
        assert stories == run_all(cold, [one])
        if turn > 0:
            assert len(history) - 20 - family.lost <= reused < len(history)
        history = (*history, *stories[one.request_id].tokens)
        history = (*history, *(rng.randrange(3, vocab) for _ in range(20)))
    assert warm.memory.at_baseline()
    warm.memory.check()
