"""Policies: pure choices among pairs that have room."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from services.router.fleet import Pair
from services.router.policy import (
    Candidate,
    LeastLoad,
    Load,
    Policy,
    PolicyName,
    PrefixAffinity,
    RoundRobin,
    make_policy,
)
from sluice.types import Epoch

PAGE = 4


def candidates(
    decodes: dict[str, int], prefills: dict[str, int], capacity: int = 10
) -> list[Candidate]:
    """All pairs, with these requests in use."""
    return [
        Candidate(Pair(d, p, prefill_epoch=Epoch("1")), Load(i, capacity), Load(j, capacity), 0)
        for d, i in decodes.items()
        for p, j in prefills.items()
    ]


@pytest.mark.parametrize("name", PolicyName)
def test_each_policy_takes_one_of_what_it_was_given(name: PolicyName) -> None:
    policy = make_policy(name, PAGE)
    draw = random.Random(0)
    for _ in range(200):
        pairs = candidates(
            {f"d{i}": draw.randrange(10) for i in range(draw.randint(1, 3))},
            {f"p{i}": draw.randrange(10) for i in range(draw.randint(1, 3))},
        )
        prompt = tuple(draw.randrange(3) for _ in range(draw.randint(1, 20)))
        assert policy.choose(pairs, prompt) in pairs


def test_least_load_weighs_by_capacity() -> None:
    small = Candidate(Pair("small", "p"), Load(3, 4), Load(0, 1), 0)
    large = Candidate(Pair("large", "p"), Load(20, 100), Load(0, 1), 0)
    assert LeastLoad().choose([small, large], ()) is large


def test_round_robin_takes_turns() -> None:
    pairs = candidates({"a": 9, "b": 0}, {"p": 0})
    used = Candidate(pairs[1].pair, pairs[1].decode, pairs[1].prefill, last_pick=7)
    assert RoundRobin().choose([used, pairs[0]], ()) is pairs[0]


def place(policy: Policy, pairs: Sequence[Candidate], prompt: Sequence[int]) -> str:
    return policy.choose(pairs, tuple(prompt)).pair.prefill


def test_a_longer_prompt_follows_its_prefix() -> None:
    policy = PrefixAffinity(PAGE)
    pairs = candidates({"d": 0}, {f"p{i}": 0 for i in range(8)})
    shared = list(range(100, 100 + 3 * PAGE))
    home = place(policy, pairs, shared)
    for tail in range(20):
        assert place(policy, pairs, [*shared, tail, tail + 1]) == home
    # The longest known prefix counts, not the first page alone.
    policy._seen.clear()
    other = candidates({"d": 0}, {"far": 0})
    assert place(policy, other, shared) == "far"
    assert place(policy, pairs + other, [*shared, 7]) == "far"


def test_first_pages_spread_and_routers_agree() -> None:
    pairs = candidates({"d": 0}, {f"p{i}": 0 for i in range(4)})
    prompts = [tuple(random.Random(i).choices(range(1000), k=PAGE)) for i in range(200)]
    homes = [[place(PrefixAffinity(PAGE), pairs, prompt) for prompt in prompts] for _ in range(2)]
    assert homes[0] == homes[1]
    counts = Counter(homes[0])
    assert len(counts) == 4
    assert min(counts.values()) > 25


def test_a_crowded_prefill_loses_its_prefixes_to_another() -> None:
    policy = PrefixAffinity(PAGE)
    shared = tuple(range(PAGE))
    calm = candidates({"d": 0}, {f"p{i}": 0 for i in range(4)})
    home = place(policy, calm, shared)
    crowded = candidates({"d": 0}, {f"p{i}": 8 if f"p{i}" == home else 0 for i in range(4)})
    moved = place(policy, crowded, shared)
    assert moved != home
    assert place(policy, calm, shared) == moved, "the prefix is there now"


def test_a_new_life_of_a_prefill_knows_no_prefixes() -> None:
    policy = PrefixAffinity(PAGE)
    shared = tuple(range(PAGE))
    old = candidates({"d": 0}, {"p": 0})
    place(policy, old, shared)
    new = Candidate(Pair("d", "p", prefill_epoch=Epoch("2")), Load(0, 1), Load(0, 1), 0)
    fresh = Candidate(Pair("d", "q", prefill_epoch=Epoch("9")), Load(0, 1), Load(0, 1), 0)
    chosen = {policy.choose([new, fresh], (*shared, i)).pair.prefill for i in range(3)}
    assert len(chosen) == 1, "rendezvous again, whatever it gives"
    assert ("p", "1") not in policy._seen.values()


def test_short_prompts_go_by_load() -> None:
    pairs = candidates({"d": 0}, {"a": 5, "b": 1})
    assert place(PrefixAffinity(PAGE), pairs, (1,)) == "b"


def test_what_is_remembered_is_bounded() -> None:
    policy = PrefixAffinity(PAGE, remembered=10)
    pairs = candidates({"d": 0}, {"a": 0})
    for start in range(50):
        place(policy, pairs, range(start * 100, start * 100 + 2 * PAGE))
    assert len(policy._seen) == 10
