"""What an operator reads off real pods: where a request's time went, what crossed, and who is to blame."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.transfer.faults import FaultPoint
from sluice.transfer.messages import Timings
from sluice.types import Sampling
from tests.e2e.pods import Pair, generate

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(180)]

PROMPT = tuple(range(3, 143))
HELD_S = 0.3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Pair]:
    pair = Pair.create(
        tmp_path_factory.mktemp("pair"),
        model_dir,
        metrics_listen="127.0.0.1:0",
        decode_canary_floor_bytes_s="1000000",
        prefill_max_batch_tokens="64",  # so that the prompt takes several chunks
    )
    pair.start()
    asyncio.run(pair.ready())
    yield pair
    pair.kill()


def parts_of(timings: Timings) -> dict[str, float]:
    names = ("queue", "prefill", "transfer", "adopt", "first_decode")
    return dict(zip(names, timings.parts, strict=True))


async def first_timings(pair: Pair, hold: FaultPoint | None = None) -> Timings:
    """Of one request, held for a while at one point of its life."""
    if hold is not None:
        pair.hold(hold)
    running = asyncio.create_task(generate(pair, PROMPT, Sampling(max_tokens=4, ignore_eos=True)))
    if hold is not None:
        await pair.reached(hold)
        await asyncio.sleep(HELD_S)
        pair.let_go(hold)
    answer = await running
    assert answer.finished is not None
    return answer.finished.usage.timings


@pytest.mark.parametrize(
    ("point", "part"),
    [
        (FaultPoint.DECODE_QUEUED, "queue"),
        (FaultPoint.DECODE_GRANTED, "queue"),
        (FaultPoint.PREFILL_STARTED, "queue"),
        (FaultPoint.PREFILL_CHUNK, "prefill"),
        (FaultPoint.PREFILL_COMPLETE, "transfer"),
        (FaultPoint.DECODE_ADOPTED, "first_decode"),
    ],
)
def test_time_lost_anywhere_shows_in_its_part_and_the_parts_add_up(
    pair: Pair, point: FaultPoint, part: str
) -> None:
    asyncio.run(pair.ready())
    timings = asyncio.run(first_timings(pair, point))
    parts = parts_of(timings)
    assert sum(timings.parts) == pytest.approx(timings.ttft_s, abs=1e-6)
    assert min(timings.parts) >= 0
    assert parts[part] >= HELD_S, parts
