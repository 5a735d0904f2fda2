"""A prefill engine and a decode engine in one process, rows copied span by span: equal to one
aggregated engine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from sluice.config import EngineConfig, PoolConfig, PoolMode
from sluice.engine.core import EngineCore
from sluice.engine.outputs import ChunkReady, Prefilled, PrefillOutcome, Reservation, Reserved
from sluice.layout.component import Coverage, Owner
from sluice.types import Request, RequestId, Role
from tests.unit.engine.driving import Story, run_all, run_until_idle, tell
from tests.unit.engine.toy_model import copy_state, pool_config, prompt_of, request, toy_core

MODES = list(PoolMode)
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 50)
WARM = {"temperature": 0.9, "top_p": 0.95}


@dataclass
class Pair:
    """Both engines and what they said so far."""

    prefill: EngineCore
    decode: EngineCore
    chunks: dict[RequestId, list[ChunkReady]] = field(default_factory=dict)
    outcomes: dict[RequestId, PrefillOutcome] = field(default_factory=dict)
    reservations: dict[RequestId, Reservation] = field(default_factory=dict)
    stories: dict[RequestId, Story] = field(default_factory=dict)

    def prefill_all(self, requests: Sequence[Request]) -> None:
        for one in requests:
            chunks = self.chunks.setdefault(one.request_id, [])
            self.prefill.submit(one, chunks.append)
        for output in run_until_idle(self.prefill):
            assert isinstance(output, Prefilled)
            self.outcomes[output.request_id] = output.outcome

    def reserve_all(self, requests: Sequence[Request]) -> None:
        for one in requests:
            self.decode.submit(one)
        for output in run_until_idle(self.decode):
            assert isinstance(output, Reserved)
            self.reservations[output.request_id] = output.reservation

    def hand_over(self, one: Request, *, with_draft: bool = True) -> None:
        name = one.request_id
        final = self.chunks[name][-1]
        assert final.final
        assert final.first_token is not None
        target = self.reservations[name].tables
        copy_state(
            self.prefill.memory,
            final.tables,
            self.decode.memory,
            target,
            len(one.prompt),
            with_draft=with_draft,
        )
        self.prefill.release(name)
        self.decode.adopt(name, final.first_token, draft_valid=with_draft)

    def finish(self) -> dict[RequestId, Story]:
        tell(self.stories, run_until_idle(self.decode))
        assert self.prefill.memory.at_baseline()
        assert self.decode.memory.at_baseline()
        return self.stories


def _pair(mode: PoolMode, budget: int = 512, steps: int = 3) -> Pair:
    config = EngineConfig(max_batch_tokens=budget)
    roomy = pool_config(mode, num_slots=20)
    return Pair(
        toy_core(Role.PREFILL, mode, config=config, pool=roomy, steps=steps),
        toy_core(Role.DECODE, mode, config=EngineConfig(max_running=20), pool=roomy, steps=steps),
    )


def _requests(**sampling: object) -> list[Request]:
    return [request(f"r{n}", prompt_of(n), seed=n, **sampling) for n in LENGTHS]


def _disaggregated(pair: Pair, requests: Sequence[Request]) -> dict[RequestId, Story]:
    pair.prefill_all(requests)
    pair.reserve_all(requests)
    for one in reversed(requests):
        pair.hand_over(one)
    return pair.finish()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [5, 512])
@pytest.mark.parametrize("sampling", [{}, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("steps", [0, 3])
def test_disaggregated_equals_aggregated_in_tokens_and_accepted_counts(
    mode: PoolMode, budget: int, sampling: dict[str, object], steps: int
) -> None:
    """Buffers start as NaN on both sides, and a NaN that is read makes the toy model raise."""
    requests = _requests(**sampling)
    aggregated = run_all(toy_core(mode=mode, steps=steps), requests)
    assert _disaggregated(_pair(mode, budget, steps), requests) == aggregated


@pytest.mark.parametrize("mode", MODES)
def test_without_the_draft_component_tokens_are_equal_and_drafting_resumes(mode: PoolMode) -> None:
    requests = _requests()
    aggregated = run_all(toy_core(mode=mode), requests)
    pair = _pair(mode)
    pair.prefill_all(requests)
    pair.reserve_all(requests)
    for one in requests:
        pair.hand_over(one, with_draft=False)
    stories = pair.finish()
    for name, story in stories.items():
        assert story.tokens == aggregated[name].tokens
        # First token, then one step without a draft, then drafts again.
        assert story.accepted[:2] == [None, None]
        assert None not in story.accepted[2:-1]
    assert stories != aggregated


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_row_of_any_component_is_noticed(mode: PoolMode) -> None:
    """The equality above would not mean much if unsent rows went unread."""
    one = request("r", prompt_of(17), max_tokens=12)
    names = [c.name for c in toy_core(mode=mode).memory.components()]
    for skipped in names:
        pair = _pair(mode)
        pair.prefill_all([one])
        pair.reserve_all([one])
        source, target = pair.chunks[one.request_id][-1], pair.reservations[one.request_id]
        first_token = source.first_token
        assert first_token is not None
        copy_state(
            pair.prefill.memory,
            source.tables,
            pair.decode.memory,
            target.tables,
            17,
            skip=skipped,
        )
        pair.decode.adopt(one.request_id, first_token)
        tell(pair.stories, run_until_idle(pair.decode))
        assert pair.stories[one.request_id].error is not None, skipped


@pytest.mark.parametrize("mode", MODES)
def test_chunks_cover_the_prompt_in_order_and_the_last_one_has_the_token(mode: PoolMode) -> None:
    pair = _pair(mode, budget=7)
    one = request("r", prompt_of(20))
    pair.prefill_all([one])
    chunks = pair.chunks[one.request_id]
    assert [(c.start, c.stop, c.final) for c in chunks] == [
        (0, 7, False),
        (7, 14, False),
        (14, 20, True),
    ]
    assert [c.first_token is None for c in chunks] == [True, True, False]
    outcome = pair.outcomes[one.request_id]
    assert outcome.first_token == chunks[-1].first_token
    assert outcome.finish_reason is None
    assert outcome.queue_s >= 0
    assert outcome.prefill_s > 0
    chunks[0].fence()
    pair.prefill.release(one.request_id)
    assert pair.prefill.memory.at_baseline()


def test_history_rows_announced_by_a_chunk_do_not_change_later() -> None:
    pair = _pair(PoolMode.PAGED, budget=6)
    one = request("r", prompt_of(30))
    buffer = pair.prefill.memory.buffer("target.c4", 0)
    seen: list[tuple[int, list[float]]] = []

    def read(chunk: ChunkReady) -> None:
        page = chunk.tables.pages[0]
        rows = min(chunk.stop, 16) // 4
        seen.append((rows, buffer[page * 4 : page * 4 + rows, 0].tolist()))

    pair.prefill.submit(one, read)
    run_until_idle(pair.prefill)
    final = seen[-1][1]
    assert len(final) == 4
    for rows, values in seen:
        assert values == final[:rows]


def test_a_first_token_that_ends_the_request_ends_it_on_both_sides() -> None:
    pair = _pair(PoolMode.PAGED)
    one = request("r", prompt_of(9), max_tokens=1)
    pair.prefill_all([one])
    assert pair.outcomes[one.request_id].finish_reason is not None
    pair.reserve_all([one])
    pair.hand_over(one)
    story = pair.finish()[one.request_id]
    assert len(story.tokens) == 1
    assert story.finish is pair.outcomes[one.request_id].finish_reason


@pytest.mark.parametrize("mode", MODES)
def test_prefill_keeps_items_until_release_whatever_happens(mode: PoolMode) -> None:
    core = toy_core(Role.PREFILL, mode, config=EngineConfig(max_batch_tokens=8))

    def explode(_: ChunkReady) -> None:
        raise ValueError("no room to enqueue")

    core.submit(request("aborted", prompt_of(20)), lambda chunk: None)
    core.submit(request("queued", prompt_of(20)), lambda chunk: None)
    core.submit(request("broken", prompt_of(4)), explode)
    core.abort(RequestId("queued"))
    core.step()
    core.abort(RequestId("aborted"))
    stories: dict[RequestId, Story] = {}
    tell(stories, run_until_idle(core))
    assert {name: type(s.error).__name__ for name, s in stories.items()} == {
        "queued": "Aborted",
        "aborted": "Aborted",
        "broken": "InternalError",
    }
    assert core.stats().waiting == 2
    assert not core.stats().baseline
    for name in stories:
        core.release(name)
        core.release(name)
    assert core.memory.at_baseline()
    assert core.stats().waiting == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_quarantined_reservation_is_out_of_use_until_it_is_released(mode: PoolMode) -> None:
    pool = pool_config(mode, num_slots=1)
    core = toy_core(Role.DECODE, mode, pool=pool)
    core.submit(request("a", prompt_of(20)))
    core.submit(request("b", prompt_of(20)))
    run_until_idle(core)
    core.quarantine(RequestId("a"))
    assert run_until_idle(core) == []  # the slot is set apart, b waits
    assert any(space.quarantined for space in core.stats().occupancy)
    core.release(RequestId("a"))
    (reserved,) = run_until_idle(core)
    assert reserved.request_id == "b"
    core.release(RequestId("b"))
    assert core.memory.at_baseline()


@pytest.mark.parametrize("mode", MODES)
def test_decode_maps_window_pages_for_the_tail_only(mode: PoolMode) -> None:
    core = toy_core(Role.DECODE, mode)
    core.submit(request("a", prompt_of(200)))
    run_until_idle(core)
    held = {space.space.value: space.held for space in core.stats().occupancy}
    assert held["PAGE"] == 13
    assert held.get("WINDOW_PAGE", 1) <= 2


def test_layouts_of_a_pair_agree_and_the_draft_comes_last() -> None:
    pair = _pair(PoolMode.UNIFIED)
    one, other = pair.prefill.layout(), pair.decode.layout()
    assert (one.role, other.role) == ("prefill", "decode")
    assert one.components == other.components
    assert (one.model, one.geometry, one.spec) == (other.model, other.geometry, other.spec)
    assert one.geometry.ring_rows == 8 + 4 - 1
    assert (one.spec.algorithm, one.spec.draft_tokens, one.spec.draft_ratios) == ("mtp", 4, (0,))
    owners = [c.owner for c in one.components]
    assert owners == [Owner.TARGET] * 3 + [Owner.DRAFT] * 2
    assert one.components[-1].coverage is Coverage.LAST
    plain = toy_core(steps=0).layout()
    assert (plain.spec.algorithm, plain.spec.steps, plain.spec.draft_tokens) == ("none", 0, 1)


@pytest.mark.parametrize("fill", ["nan", "pattern"])
def test_random_interleavings_leave_both_pools_at_baseline(fill: str) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        mode = MODES[seed % 2]
        pool = PoolConfig(
            mode=mode, page_tokens=16, num_pages=20, num_window_pages=12, num_slots=4, fill=fill
        )
        core = toy_core(mode=mode, pool=pool, config=EngineConfig(max_batch_tokens=9))
        alive: list[RequestId] = []
        for i in range(40):
            match rng.randrange(4):
                case 0:
                    one = request(f"{i}", prompt_of(rng.randrange(1, 60), i), seed=i, **WARM)
                    core.submit(one)
                    alive.append(one.request_id)
                case 1 if alive:
                    core.abort(alive.pop(rng.randrange(len(alive))))
                case _:
                    core.step()
            core.memory.check()
        run_until_idle(core)
        assert core.memory.at_baseline()
