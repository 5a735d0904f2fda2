"""Several async generators as one, in the order their items come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
_AHEAD_ITEMS = 4  # a slow client holds the pods back, not this process's memory


@dataclass(frozen=True)
class _Ended:
    failure: Exception | None


async def merge(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Items with the index of their source. The first failure is raised; all others are closed."""
    queue: asyncio.Queue[tuple[int, T] | _Ended] = asyncio.Queue(_AHEAD_ITEMS)

    async def pump(index: int, source: AsyncGenerator[T]) -> None:
        failure: Exception | None = None
        try:
            async with aclosing(source):
                async for item in source:
                    await queue.put((index, item))
        except Exception as error:
            failure = error
        await queue.put(_Ended(failure))

    tasks = [asyncio.create_task(pump(i, source)) for i, source in enumerate(sources)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if not isinstance(item, _Ended):
                yield item
            elif item.failure is not None:
                raise item.failure
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
