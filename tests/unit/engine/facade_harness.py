"""A running facade in tests: context manager, reading, and a target whose forwards wait for the
test.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sluice.engine.core import EngineCore
from sluice.engine.facade import EngineFacade, TokenStream
from sluice.models.base import ForwardBatch
from tests.unit.engine.toy_model import ToyTarget

SOON_S = 5.0


@asynccontextmanager
async def running(core: EngineCore) -> AsyncIterator[EngineFacade]:
    facade = EngineFacade(core)
    await facade.start()
    try:
        async with asyncio.timeout(60):
            yield facade
    finally:
        await facade.stop()


async def read(stream: TokenStream) -> list[int]:
    return [token async for event in stream for token in event.token_ids]


async def settled(facade: EngineFacade) -> None:
    """Abandonment has no reply, so ask until its effect shows."""
    async with asyncio.timeout(SOON_S):
        while not (await facade.stats()).baseline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Gate:
    """A target whose forwards wait until the test lets them go on."""

    def __init__(self, after: int = 0) -> None:
        self.target = ToyTarget()
        self.entered = threading.Event()
        self.open = threading.Event()
        self._after = after
        self.target.before_forward = self._wait

    def _wait(self, batch: ForwardBatch) -> None:
        if self.target.forwards > self._after:
            self.entered.set()
            assert self.open.wait(30)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, SOON_S)
