"""Disaggregated equals aggregated: tokens and accepted counts of every step, over real NIXL between processes."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from sluice.config import PoolMode
from sluice.types import Sampling
from tests.e2e.aggregated import Case, Outcome, run_aggregated
from tests.e2e.pods import Pair, generate

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(600)]

CONCURRENCY = 8
TCP = {"UCX_TLS": "tcp"}  # what two pods in two containers get; processes on one host copy by CMA
# (pool mode, prefill's token budget a step, UCX): one chunk, and chunks that cross every boundary at odd places.
SETUPS = [
    (PoolMode.PAGED, 1024, {}),
    (PoolMode.PAGED, 37, TCP),
    (PoolMode.UNIFIED, 1024, TCP),
    (PoolMode.UNIFIED, 37, {}),
]


def boundary_lengths(window: int) -> list[int]:
    return [
        *range(1, 10),
        *range(window - 1, window + 2),
        *range(127, 131),
        *range(255, 258),
        513,
    ]


def mixed_cases(model_dir: Path) -> list[Case]:
    """50+ prompts over every boundary: greedy, sampled, and short answers of 1, 2 and 3 tokens."""
    window = json.loads((model_dir / "config.json").read_text())["sliding_window"]
    rng = random.Random(7)
    cases = []
    for number, length in enumerate(
        boundary_lengths(window) * 2 + [600, 700, 384, 640, 33, 100, 64, 200, 300, 450, 550, 17]
    ):
        prompt = tuple(rng.randrange(3, 500) for _ in range(length))
        temperature = (0.0, 0.0, 0.8)[number % 3]
        max_tokens = (24, 24, 1, 24, 2, 24, 3)[number % 7]
        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=0.95 if number % 2 else 1.0,
            seed=number,
            ignore_eos=bool(number % 5),
        )
        cases.append(Case(prompt, sampling))
    return cases


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> list[Outcome]:
    return asyncio.run(run_aggregated(model_dir, mixed_cases(model_dir)))


async def run_disaggregated(pair: Pair, cases: list[Case]) -> list[Outcome]:
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(case: Case) -> Outcome:
        async with places:
            answer = await generate(pair, case.prompt, case.sampling, timeout_s=120.0)
        assert answer.finished is not None
        usage = answer.finished.usage
        assert usage.prompt_tokens == len(case.prompt)
        assert usage.completion_tokens == len(answer.token_ids)
        return Outcome(
            tuple(answer.token_ids),
            tuple(answer.accepted),
            answer.finished.reason.value,
            tuple(answer.logprobs),
            answer.prompt_logprobs,
        )

    return list(await asyncio.gather(*(one(case) for case in cases)))


@pytest.mark.parametrize(
    ("mode", "budget", "ucx"),
    SETUPS,
    ids=[f"{mode.value}-{budget}-{'tcp' if ucx else 'cma'}" for mode, budget, ucx in SETUPS],
)
def test_disaggregated_equals_aggregated(
    tmp_path: Path,
    model_dir: Path,
    oracle: list[Outcome],
    mode: PoolMode,
    budget: int,
    ucx: dict[str, str],
) -> None:
    """Destination rows hold NaN beforehand, so a byte that was never sent can't go unnoticed."""
    cases = mixed_cases(model_dir)
    assert len(cases) > 50
    pair = Pair.create(
        tmp_path,
        model_dir,
        ucx,
        pool_mode=mode.value,
        debug_fill="nan",
        max_batch_tokens=str(budget),
    )

    async def run() -> list[Outcome]:
        await pair.ready()
        outcomes = await run_disaggregated(pair, cases)
        await pair.baseline()
        return outcomes

    pair.start()
    try:
        outcomes = asyncio.run(run())
    finally:
        pair.kill()
    for case, expected, got in zip(cases, oracle, outcomes, strict=True):
        assert got == expected, f"prompt of {len(case.prompt)} tokens, {case.sampling}"
