"""Open and closed loops: when requests leave, how many are open, and what a stop leaves behind."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest

from sluice.cli.bench.drive import Watch, closed_loop, constant, open_loop, poisson
from sluice.cli.bench.sample import Sample
from sluice.cli.bench.workload import Item

_ITEMS = [Item("x", 1) for _ in range(12)]
Clock = Callable[[], float]


def test_arrivals() -> None:
    assert list(itertools.islice(constant(4.0), 4)) == [0.0, 0.25, 0.5, 0.75]
    times = list(itertools.islice(poisson(5.0, seed=1), 5000))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)  # exponential: memoryless
    assert times == list(itertools.islice(poisson(5.0, seed=1), 5000))


@pytest.mark.asyncio
async def test_an_open_loop_does_not_wait_for_a_server_that_hangs() -> None:
    """The closed loop hidden in an open one is how coordinated omission begins."""
    all_sent = asyncio.Event()
    watch = Watch(len(_ITEMS))

    async def send(item: Item, due: float, clock: Clock) -> Sample:
        sent = clock()
        if watch.running == len(_ITEMS):
            all_sent.set()
        await all_sent.wait()
        return Sample(due, sent, clock())

    async with asyncio.timeout(20):
        samples = await open_loop(_ITEMS, constant(200.0), send, watch)
    assert sorted(sample.due_s for sample in samples) == [index / 200 for index in range(12)]
    assert all(sample.sent_s >= sample.due_s for sample in samples)
    assert watch.running == 0


@pytest.mark.asyncio
async def test_a_request_that_leaves_late_keeps_its_due_time() -> None:
    async def send(item: Item, due: float, clock: Clock) -> Sample:
        return Sample(due, clock(), clock())

    samples = await open_loop(_ITEMS[:3], [0.0, -5.0, -4.0], send, Watch(3))
    assert [sample.due_s for sample in samples] == [0.0, -5.0, -4.0]


@pytest.mark.asyncio
async def test_a_closed_loop_has_so_many_open_and_ends_with_its_items() -> None:
    watch = Watch(len(_ITEMS))
    most = 0

    async def send(item: Item, due: float, clock: Clock) -> Sample:
        nonlocal most
        most = max(most, watch.running)
        await asyncio.sleep(0)
        return Sample(due, due, clock())

    samples = await closed_loop(_ITEMS, 5, None, send, watch)
    assert (len(samples), most, watch.running) == (12, 5, 0)


@pytest.mark.asyncio
async def test_a_closed_loop_starts_nothing_after_its_time() -> None:
    async def send(item: Item, due: float, clock: Clock) -> Sample:
        await asyncio.sleep(0.03)
        return Sample(due, due, clock())

    samples = await closed_loop(_ITEMS * 1000, 2, 0.1, send, Watch(0))
    assert 2 <= len(samples) < 12000
    assert all(sample.due_s < 0.1 for sample in samples)


@pytest.mark.asyncio
async def test_a_stop_cancels_what_is_open_and_keeps_what_ended() -> None:
    cancelled = 0
    watch = Watch(len(_ITEMS))

    async def send(item: Item, due: float, clock: Clock) -> Sample:
        nonlocal cancelled
        if due > 0.0:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled += 1
                raise
        return Sample(due, due, clock())

    load = asyncio.create_task(open_loop(_ITEMS, constant(1000.0), send, watch))
    async with asyncio.timeout(20):
        while watch.running < 11:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert (len(watch.samples), cancelled, watch.running) == (1, 11, 0)
