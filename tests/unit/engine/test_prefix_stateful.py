"""Random lives of requests that begin alike, in an engine short of everything: nobody is refused what an
engine without reuse would give, everybody says what it would have said alone, and nothing leaks.
"""

from __future__ import annotations

import functools

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from sluice.config import EngineConfig, PoolConfig, PoolMode
from sluice.engine.core import EngineCore
from sluice.engine.request import Status
from sluice.types import Request, RequestId
from tests.unit.engine.driving import Story, run_all, run_until_idle, tell
from tests.unit.engine.toy_history import HistoryDraft, HistoryToy
from tests.unit.engine.toy_model import ToyDraft, ToyTarget, prompt_of, request, toy_core
from tests.unit.engine.toy_recurrent import RecurrentToy

FAMILIES = {
    "windows": (ToyTarget, ToyDraft),
    "recurrent": (RecurrentToy, ToyDraft),
    "history": (HistoryToy, HistoryDraft),
}
BEGINNING = prompt_of(70)
PARTS = (3, 16, 30, 33, 50, 64)
TAILS = (1, 9, 20)
OUTPUTS = (2, 25)
Shape = tuple[int, int, int]


def _core(
    family: str, mode: PoolMode, config: EngineConfig, pool: PoolConfig | None = None
) -> EngineCore:
    target, draft = FAMILIES[family]
    return toy_core(mode=mode, target=target(), draft=draft(), config=config, pool=pool)


def _request(name: str, shape: Shape) -> Request:
    part, tail, output = shape
    prompt = (*BEGINNING[:part], *prompt_of(tail, part))
    return request(name, prompt, max_tokens=output, seed=7, temperature=0.8)


@functools.cache
def _alone(family: str, shape: Shape) -> Story:
    one = _request("alone", shape)
    return run_all(_core(family, PoolMode.PAGED, EngineConfig()), [one])[one.request_id]


class PrefixMachine(RuleBasedStateMachine):
    family: str
    mode: PoolMode
    max_bytes = 1 << 20

    def __init__(self) -> None:
        super().__init__()
        pool = PoolConfig(
            mode=self.mode,
            page_tokens=16,
            num_pages=9,
            num_window_pages=12,
            num_slots=4,
            fill="nan",
        )
        config = EngineConfig(
            max_batch_tokens=25,
            max_running=3,
            promised_output=0.0,
            prefix_bytes=self.max_bytes,
            prefix_interval_tokens=16,
        )
        self.core = _core(self.family, self.mode, config, pool)
        self.shapes: dict[RequestId, Shape] = {}
        self.stories: dict[RequestId, Story] = {}

    @rule(part=st.sampled_from(PARTS), tail=st.sampled_from(TAILS), output=st.sampled_from(OUTPUTS))
    def arrive(self, part: int, tail: int, output: int) -> None:
        one = _request(f"r{len(self.shapes)}", (part, tail, output))
        self.shapes[one.request_id] = (part, tail, output)
        self.core.submit(one)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.core.step()
        tell(self.stories, self.core.drain())

    @rule(pick=st.integers(0, 9))
    def retract(self, pick: int) -> None:
        if running := self._in(Status.RUNNING):
            self.core.retract(running[pick % len(running)])

    @rule(pick=st.integers(0, 9), status=st.sampled_from(list(Status)))
    def abort(self, pick: int, status: Status) -> None:
        if found := self._in(status):
            self.core.abort(found[pick % len(found)])
            tell(self.stories, self.core.drain())

    @invariant()
    def books_balance(self) -> None:
        self.core.memory.check()
        prefixes = self.core._scheduler._prefixes
        assert prefixes is not None
        assert prefixes.num_bytes <= self.max_bytes

    @invariant()
    def a_page_that_several_hold_is_behind_everybodys_next_row(self) -> None:
        """Nobody writes below its committed length, so a shared page is never written."""
        for one in self.core._requests.values():
            if one.tables is None:
                continue
            ledger = self.core.memory._pages._ledger
            shared = ledger._accounts[one.tables.slot].shared
            full = one.tables.pages[: one.tables.kv_len // 16]
            assert shared <= set(full)

    def teardown(self) -> None:
        tell(self.stories, run_until_idle(self.core))
        assert self.core.stats().queued == self.core.stats().retracted == 0
        assert self.core.memory.at_baseline()
        for name, story in self.stories.items():
            alone = _alone(self.family, self.shapes[name])
            if story.finish is not None:
                assert (story.tokens, story.accepted) == (alone.tokens, alone.accepted)
            else:
                assert story.error is not None
                assert story.tokens == alone.tokens[: len(story.tokens)]

    def _in(self, status: Status) -> list[RequestId]:
        return sorted(n for n, r in self.core._requests.items() if r.status is status)


@pytest.mark.parametrize("mode", list(PoolMode))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_lives_of_requests_that_begin_alike(family: str, mode: PoolMode) -> None:
    machine = type("Machine", (PrefixMachine,), {"family": family, "mode": mode})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=8,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
