"""Sending a load: on a schedule whatever the server does (open loop), or one after the other (closed loop)."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from sluice.cli.bench.sample import Sample
from sluice.cli.bench.workload import Item

Send = Callable[[Item, float, Callable[[], float]], Awaitable[Sample]]  # (item, due_s, clock)


@dataclass
class Watch:
    """What a progress display looks at while a load runs."""

    total: int
    running: int = 0
    samples: list[Sample] = field(default_factory=list)


def poisson(rate: float, seed: int = 0) -> Iterable[float]:
    """Seconds of arrivals at ``rate`` a second, independent of one another, without end."""
    rng = random.Random(f"arrivals {seed}")
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        yield at


def constant(rate: float) -> Iterable[float]:
    """Seconds of arrivals every ``1 / rate``, the first at 0, without end."""
    return (index / rate for index in itertools.count())


async def open_loop(
    items: Iterable[Item], due_s: Iterable[float], send: Send, watch: Watch
) -> list[Sample]:
    """Each item at its time, however many are still open. Cancelling this cancels them; ``watch`` keeps what ended."""
    clock = _clock()
    async with asyncio.TaskGroup() as group:
        for item, due in zip(items, due_s, strict=False):
            wait = due - clock()
            if wait > 0:
                await asyncio.sleep(wait)
            group.create_task(_one(item, due, clock, send, watch))
    return watch.samples


async def closed_loop(
    items: Iterable[Item], concurrency: int, duration_s: float | None, send: Send, watch: Watch
) -> list[Sample]:
    """``concurrency`` at once; no new one after ``duration_s``. Nothing is due before it is sent."""
    clock = _clock()
    waiting = iter(items)

    async def work() -> None:
        for item in waiting:
            if duration_s is not None and clock() >= duration_s:
                return
            await _one(item, clock(), clock, send, watch)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return watch.samples


async def _one(
    item: Item, due: float, clock: Callable[[], float], send: Send, watch: Watch
) -> None:
    watch.running += 1
    try:
        watch.samples.append(await send(item, due, clock))
    finally:
        watch.running -= 1


def _clock() -> Callable[[], float]:
    began = time.perf_counter()
    return lambda: time.perf_counter() - began
