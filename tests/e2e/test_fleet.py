"""A fleet of two layout classes under load while its pods drain, die, hang, crawl, refuse and vanish."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.fleet import Fleet, Outcome, stream, streams
from tests.e2e.fleet_faults import FAULTS, TOKENS, Scene

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nixl,
    pytest.mark.slow,
    pytest.mark.asyncio,
    pytest.mark.timeout(300),
]
PROMPTS = [f"And it came to pass in the {n}th year" for n in range(3, 11)]
PATIENT_S = 40.0


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Fleet]:
    fleet = Fleet.create(tmp_path_factory.mktemp("fleet"), model_dir, policy="round_robin")
    fleet.start()
    yield fleet
    fleet.stop()


@pytest_asyncio.fixture
async def fleet(started: Fleet) -> AsyncIterator[Fleet]:
    """Whole before and after each test, whatever the test did to it."""
    for pair in started.pairs:
        started.list_pair(pair)
    for pod in started.pods:
        if not pod.alive():
            pod.start()
    await started.ready(*started.pairs)
    await started.baseline()
    yield started
    for pod in started.pods:
        if pod.alive():
            pod.thaw()


@pytest_asyncio.fixture
async def answers(fleet: Fleet) -> dict[str, str]:
    """The whole greedy answer to each prompt, asked for once."""
    if fleet.answers:
        return fleet.answers
    outcomes = await streams(fleet, PROMPTS, TOKENS, at_once=4)
    assert all(outcome.good for outcome in outcomes), outcomes
    fleet.answers = {prompt: o.text for prompt, o in zip(PROMPTS, outcomes, strict=True)}
    return fleet.answers


def check(outcomes: list[Outcome], answers: dict[str, str], timeout_s: float) -> None:
    """Each client got all of its text once, or the beginning of it and an error, in time."""
    for prompt, outcome in zip(PROMPTS, outcomes, strict=True):
        assert outcome.seconds < timeout_s + 2.0, outcome
        if outcome.good:
            assert outcome.text == answers[prompt]
        else:
            assert outcome.error, "it ended without a word"
            assert not outcome.done
            assert answers[prompt].startswith(outcome.text)


async def test_two_classes_never_cross_and_one_drains_without_an_error(fleet: Fleet) -> None:
    """200 requests; in the middle one class is taken off the file, finishes what it has and ends."""
    before = len(fleet.attempts())
    old, new = fleet.pairs
    load = asyncio.create_task(streams(fleet, PROMPTS * 25, 6, at_once=16))
    while len(fleet.attempts()) < before + 70:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    fleet.list_pair(old, "draining")
    await fleet.ready(new)
    picked = len(fleet.attempts())
    fleet.list_pair(old, None)
    codes = await asyncio.gather(
        *(asyncio.to_thread(pod.stop) for pod in (old.decode, old.prefill))
    )
    outcomes = await load
    assert codes == [0, 0]
    assert [outcome for outcome in outcomes if not outcome.good] == []
    by_prompt = {
        prompt: {outcome.text for outcome in outcomes[rank::8]}
        for rank, prompt in enumerate(PROMPTS)
    }
    assert all(len(texts) == 1 for texts in by_prompt.values()), "one answer from both classes"
    attempts = fleet.attempts()[before:]
    allowed = {(pair.decode.address, pair.prefill.address) for pair in fleet.pairs}
    assert set(attempts) == allowed
    late = set(fleet.attempts()[picked:])
    assert late == {(new.decode.address, new.prefill.address)}, "picked after it was taken off"


@pytest.mark.parametrize(
    ("role", "fault"),
    [
        *itertools.product(
            ("prefill", "decode"), ("killed", "frozen", "slow", "full", "vanished", "deleted")
        ),
        ("decode", "starved"),
    ],
)
async def test_clients_hear_the_truth_in_time(
    fleet: Fleet, answers: dict[str, str], role: str, fault: str
) -> None:
    pair, what = fleet.pairs[0], FAULTS[fault]
    victim = pair.prefill if role == "prefill" else pair.decode
    outcomes = await what.strike(Scene(fleet, pair, victim, PROMPTS, what.timeout_s))
    check(outcomes, answers, what.timeout_s)
    good = [outcome.good for outcome in outcomes]
    assert all(good) if what.spares_all else any(good), outcomes
    if role == "prefill":
        cut = [o for o in outcomes if o.error not in ("", "DeadlineExceeded")]
        assert not any(o.text for o in cut), "a stream that has begun needs its prefill no more"
    fleet.list_pair(pair)
    if not victim.alive():
        victim.start()
    await fleet.ready(*fleet.pairs)
    await fleet.baseline()
    async with fleet.client() as http:
        again = await stream(http, PROMPTS[0], TOKENS)
    assert again.text == answers[PROMPTS[0]]


async def test_sixty_streams_at_once_get_all_of_their_text_once(
    fleet: Fleet, answers: dict[str, str]
) -> None:
    """A part of `bench.load`, which runs 200 at once and 5,000 in a row."""
    prompts = (PROMPTS * 8)[:60]
    outcomes = await streams(fleet, prompts, TOKENS // 2, at_once=60, timeout_s=PATIENT_S)
    assert [outcome for outcome in outcomes if not outcome.good] == []
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert outcome.text
        assert answers[prompt].startswith(outcome.text)
    assert len({(p, o.text) for p, o in zip(prompts, outcomes, strict=True)}) == len(PROMPTS)
    await fleet.baseline()


async def test_a_class_of_its_own_is_refused_by_name(fleet: Fleet) -> None:
    """What the router shows of two pods that can't work together is the field and both values."""
    async with fleet.client() as http:
        reasons = (await http.get("/ready")).json()["reasons"]
    for ours, theirs in ((0, 1), (1, 0)):
        decode, prefill = fleet.pairs[ours].decode.address, fleet.pairs[theirs].prefill.address
        why = next(r for r in reasons if r.startswith(f"decode {decode}") and prefill in r)
        assert "refused" in why
        assert "page" in why
        assert "128" in why
        assert "256" in why
