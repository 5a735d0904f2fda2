"""Ending writes on every rank: waits for all that live, and takes a rank that is gone for one that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from services import sides
from services.ranks import RankProcess
from services.sides import Sides
from sluice.errors import InternalError, RankLost, SluiceError
from sluice.transfer.side import RankSide
from sluice.types import AttemptId

pytestmark = pytest.mark.asyncio
ATTEMPT = AttemptId("a")


class _Own(RankSide):
    """This process's rank, whose handles settle when it is told."""

    def __init__(self) -> None:
        self.settled = asyncio.Event()

    async def revoke(self, attempt_id: AttemptId) -> None:
        await self.settled.wait()

    async def close(self) -> None:
        await self.settled.wait()


class _Failing(RankProcess):
    """A rank every question to which fails at once."""

    def __init__(self, error: SluiceError) -> None:
        self._error = error

    async def ask(self, method: str, *args: object) -> object:
        raise self._error


@pytest.mark.parametrize("ending", ["revoke", "close"])
async def test_a_rank_that_is_gone_does_not_hide_one_that_writes(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "_UNCLEAN_WAIT_S", 0.0)
    own = _Own()
    both = Sides(own, [_Failing(RankLost("gone"))])
    call: Awaitable[None] = both.revoke(ATTEMPT) if ending == "revoke" else both.close()
    ended = asyncio.ensure_future(call)
    await asyncio.sleep(0.05)
    assert not ended.done()
    own.settled.set()
    await ended


async def test_a_rank_that_may_still_write_is_an_error_behind_all_others() -> None:
    own = _Own()
    ended = asyncio.ensure_future(Sides(own, [_Failing(InternalError("stuck"))]).revoke(ATTEMPT))
    await asyncio.sleep(0.05)
    assert not ended.done()
    own.settled.set()
    with pytest.raises(InternalError, match="stuck"):
        await ended
