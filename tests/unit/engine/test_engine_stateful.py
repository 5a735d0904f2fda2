"""Random lives of requests in a decode engine: nothing leaks, and whoever finishes says what it would
have said alone.
"""

from __future__ import annotations

import functools

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sluice.config import EngineConfig, PoolConfig, PoolMode
from sluice.engine.core import EngineCore
from sluice.engine.outputs import ChunkReady, Reservation, Reserved
from sluice.engine.request import Status
from sluice.types import Request, RequestId, Role
from tests.unit.engine.driving import Story, run_all, run_until_idle, tell
from tests.unit.engine.toy_model import copy_state, prompt_of, request, toy_core

MODES = list(PoolMode)
PROMPTS = (1, 4, 9, 20)
OUTPUTS = (2, 14, 40)


def _request(name: str, prompt_tokens: int, max_tokens: int) -> Request:
    return request(name, prompt_of(prompt_tokens), max_tokens=max_tokens, seed=7, temperature=0.8)


@functools.cache
def _alone(prompt_tokens: int, max_tokens: int) -> Story:
    one = _request("alone", prompt_tokens, max_tokens)
    return run_all(toy_core(), [one])[one.request_id]


@functools.cache
def _prefilled(mode: PoolMode, prompt_tokens: int) -> tuple[EngineCore, ChunkReady]:
    core = toy_core(Role.PREFILL, mode)
    chunks: list[ChunkReady] = []
    core.submit(_request("source", prompt_tokens, 4), chunks.append)
    run_until_idle(core)
    return core, chunks[-1]


class EngineMachine(RuleBasedStateMachine):
    mode: PoolMode

    def __init__(self) -> None:
        super().__init__()
        pool = PoolConfig(
            mode=self.mode,
            page_tokens=16,
            num_pages=6,
            num_window_pages=10,
            num_slots=4,
            fill="nan",
        )
        config = EngineConfig(max_batch_tokens=9, max_running=3, promised_output=0.0)
        self.core = toy_core(Role.DECODE, self.mode, pool=pool, config=config)
        self.shapes: dict[RequestId, tuple[int, int]] = {}
        self.reservations: dict[RequestId, Reservation] = {}
        self.stories: dict[RequestId, Story] = {}

    @rule(prompt_tokens=st.sampled_from(PROMPTS), max_tokens=st.sampled_from(OUTPUTS))
    def arrive(self, prompt_tokens: int, max_tokens: int) -> None:
        one = _request(f"r{len(self.shapes)}", prompt_tokens, max_tokens)
        self.shapes[one.request_id] = (prompt_tokens, max_tokens)
        self.core.submit(one)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.core.step()
        self._listen()

    @precondition(lambda self: self.reservations)
    @rule(pick=st.integers(0, 9))
    def adopt(self, pick: int) -> None:
        name = self._pick(sorted(self.reservations), pick)
        reservation = self.reservations.pop(name)
        source, chunk = _prefilled(self.mode, self.shapes[name][0])
        length = len(reservation.request.prompt)
        copy_state(source.memory, chunk.tables, self.core.memory, reservation.tables, length)
        assert chunk.first_token is not None
        self.core.adopt(name, chunk.first_token)
        self._listen()

    @precondition(lambda self: self.reservations)
    @rule(pick=st.integers(0, 9), quarantined=st.booleans())
    def give_up(self, pick: int, quarantined: bool) -> None:
        name = self._pick(sorted(self.reservations), pick)
        del self.reservations[name]
        if quarantined:
            self.core.quarantine(name)
            self.core.step()
            self._listen()
        self.core.release(name)

    @rule(pick=st.integers(0, 9))
    def retract(self, pick: int) -> None:
        running = self._in(Status.RUNNING)
        if running:
            self.core.retract(self._pick(running, pick))

    @rule(pick=st.integers(0, 9), status=st.sampled_from(list(Status)))
    def abort(self, pick: int, status: Status) -> None:
        if found := self._in(status):
            self.core.abort(self._pick(found, pick))
            self._listen()

    @invariant()
    def books_balance(self) -> None:
        self.core.memory.check()
        held = sum(one.held + one.quarantined for one in self.core.memory.occupancy())
        holders = [r for r in self.core._requests.values() if r.tables is not None]
        assert (held > 0) == bool(holders)
        off = self._in(Status.RETRACTED)
        assert all((self.core._requests[name].backup is not None) for name in off)

    def teardown(self) -> None:
        """Whatever was going on comes to an end by itself, once reservations are given up."""
        self._listen()
        while True:
            for name in [*self.reservations]:
                del self.reservations[name]
                self.core.release(name)
            for output in run_until_idle(self.core):
                self._hear(output)
            if not self.reservations:
                break
        assert self.core.stats().queued == self.core.stats().retracted == 0
        assert self.core.memory.at_baseline()
        for name, story in self.stories.items():
            alone = _alone(*self.shapes[name])
            if story.finish is not None:
                assert (story.tokens, story.accepted) == (alone.tokens, alone.accepted)
            else:
                assert story.tokens == alone.tokens[: len(story.tokens)]

    def _listen(self) -> None:
        for output in self.core.drain():
            self._hear(output)

    def _hear(self, output: object) -> None:
        if isinstance(output, Reserved):
            self.reservations[output.request_id] = output.reservation
        else:
            tell(self.stories, [output])  # type: ignore[list-item]

    def _in(self, status: Status) -> list[RequestId]:
        return sorted(n for n, r in self.core._requests.items() if r.status is status)

    @staticmethod
    def _pick(names: list[RequestId], pick: int) -> RequestId:
        return names[pick % len(names)]


class PagedMachine(EngineMachine):
    mode = PoolMode.PAGED


class UnifiedMachine(EngineMachine):
    mode = PoolMode.UNIFIED


@pytest.mark.parametrize("machine", [PagedMachine, UnifiedMachine])
def test_random_lives_leave_the_pools_at_baseline(machine: type[EngineMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
