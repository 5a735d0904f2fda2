"""Merged generators: every item once, in order per source; failures close the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from services.router.merge import merge


class _Source:
    """Counts up to ``stop`` and then does what it is told."""

    def __init__(self, stop: int, then: Exception | None = None, hang: bool = False) -> None:
        self.closed = False
        self._stop, self._then, self._hang = stop, then, hang

    async def items(self) -> AsyncGenerator[int]:
        try:
            for number in range(self._stop):
                await asyncio.sleep(0)
                yield number
            if self._hang:
                await asyncio.sleep(60)
            if self._then is not None:
                raise self._then
        finally:
            self.closed = True


@pytest.mark.asyncio
async def test_every_item_once_in_order() -> None:
    merged = [item async for item in merge([_Source(n).items() for n in (7, 0, 12)])]
    for index, count in enumerate((7, 0, 12)):
        assert [number for i, number in merged if i == index] == list(range(count))


@pytest.mark.asyncio
async def test_a_failure_is_raised_and_closes_the_others() -> None:
    sources = [_Source(2, then=KeyError("x")), _Source(3, hang=True)]
    with pytest.raises(KeyError):
        async for _ in merge([source.items() for source in sources]):
            pass
    assert [source.closed for source in sources] == [True, True]


@pytest.mark.asyncio
async def test_leaving_closes_all() -> None:
    sources = [_Source(100), _Source(1, hang=True)]
    async with aclosing(merge([source.items() for source in sources])) as merged:
        await anext(merged)
    assert [source.closed for source in sources] == [True, True]


@pytest.mark.asyncio
async def test_a_slow_reader_holds_sources_back() -> None:
    made = 0

    async def endless() -> AsyncGenerator[int]:
        nonlocal made
        while True:
            made += 1
            yield made

    async with aclosing(merge([endless()])) as merged:
        await anext(merged)
        for _ in range(50):
            await asyncio.sleep(0)
        assert made < 10
