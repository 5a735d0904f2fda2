"""Plans: order, budgets, fairness."""

from __future__ import annotations

import pytest

from sluice.config import EngineConfig
from sluice.models.base import ForwardBatch
from sluice.types import Request, RequestId
from tests.unit.engine.driving import Story, run_until_idle, tell
from tests.unit.engine.toy_model import ToyTarget, pool_config, prompt_of, request, toy_core


def _batches(
    requests: list[Request], config: EngineConfig, slots: int = 8
) -> list[list[tuple[str, int, int]]]:
    """(request, start, tokens) of every segment of every target forward."""
    target, seen = ToyTarget(), []

    def record(batch: ForwardBatch) -> None:
        seen.append([(s.tables.request_id, s.start, len(s.token_ids)) for s in batch.segments])

    target.before_forward = record
    core = toy_core(target=target, config=config, pool=pool_config(num_slots=slots))
    for one in requests:
        core.submit(one)
    stories: dict[RequestId, Story] = {}
    tell(stories, run_until_idle(core))
    assert all(story.error is None for story in stories.values())
    assert len(stories) == len(requests)
    return seen


def test_several_prompts_share_a_step_first_come_first_served() -> None:
    requests = [request("a", prompt_of(5)), request("b", prompt_of(9)), request("c", prompt_of(7))]
    batches = _batches(requests, EngineConfig(max_batch_tokens=16))
    assert batches[0] == [("a", 0, 5), ("b", 0, 9), ("c", 0, 2)]
    # Running requests come first, then the rest of the prompt.
    assert batches[1] == [("a", 5, 4), ("b", 9, 4), ("c", 2, 5)]


@pytest.mark.parametrize("budget", [1, 3, 7, 16])
def test_prompts_stay_within_the_budget(budget: int) -> None:
    requests = [request(f"r{n}", prompt_of(n), max_tokens=4) for n in (5, 9, 30)]
    for batch in _batches(requests, EngineConfig(max_batch_tokens=budget)):
        decoded = sum(n for _, start, n in batch if start >= 30)
        assert sum(n for _, _, n in batch) - decoded <= max(budget, 4 + max(1, budget // 4))


def test_running_requests_take_turns_when_the_budget_is_short() -> None:
    requests = [request(f"r{i}", prompt_of(4, i), max_tokens=20) for i in range(4)]
    batches = _batches(requests, EngineConfig(max_batch_tokens=8))
    gap: dict[str, int] = {}
    for number, batch in enumerate(batches):
        for name, start, _ in batch:
            if start >= 4 and name in gap:
                assert number - gap[name] <= 4
            gap[name] = number


def test_a_prompt_progresses_beside_requests_that_could_use_the_whole_budget() -> None:
    requests = [request(f"r{i}", prompt_of(4, i), max_tokens=60) for i in range(4)]
    requests.append(request("late", prompt_of(12), max_tokens=2))
    batches = _batches(requests, EngineConfig(max_batch_tokens=8))
    done = next(
        i for i, b in enumerate(batches) if any(n == "late" and s + c == 12 for n, s, c in b)
    )
    assert done < len(batches) // 2


def test_nobody_overtakes_the_queues_head() -> None:
    """Two slots: the third request starts when one of the first two has ended, the fourth after it."""
    requests = [
        request(f"r{i}", prompt_of(3 + i, i), max_tokens=3 + 9 * (i == 1)) for i in range(4)
    ]
    batches = _batches(requests, EngineConfig(), slots=2)
    first_seen: list[str] = []
    for batch in batches:
        assert len(batch) <= 2
        first_seen += [name for name, _, _ in batch if name not in first_seen]
    assert first_seen == ["r0", "r1", "r2", "r3"]


def test_max_running_bounds_the_batch() -> None:
    requests = [request(f"r{i}", prompt_of(3, i)) for i in range(6)]
    batches = _batches(requests, EngineConfig(max_running=3))
    assert max(len(batch) for batch in batches) == 3
