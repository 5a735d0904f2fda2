"""All ranks' ends of a pod's transfers behind one face: every rank gets every order, and all must have done it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from services.ranks import RankProcess
from sluice.errors import RankLost
from sluice.transfer.pieces import join_pieces
from sluice.transfer.side import Chunk, Fence, Meeting, Order, Query, RankSide, Sent, add_up
from sluice.types import AttemptId, Epoch

_UNCLEAN_WAIT_S = 1.0  # as of a connection that broke (see ``Sender.revoke``)


class Sides:
    """``own`` is this process's rank. Methods as of ``RankSide``."""

    def __init__(self, own: RankSide, others: Sequence[RankProcess] = ()) -> None:
        self._own = own
        self._others = tuple(others)

    async def connect(self, meeting: Meeting) -> None:
        await asyncio.gather(self._own.connect(meeting), *self._ask("connect", meeting))

    async def lost(self, epoch: Epoch) -> bool:
        return any(await asyncio.gather(self._own.lost(epoch), *self._ask("lost", epoch)))

    async def disconnect(self, epoch: Epoch) -> None:
        await asyncio.gather(self._own.disconnect(epoch), *self._ask("disconnect", epoch))

    def begin(self, order: Order) -> None:
        """On this rank; ``begin_others`` must have returned before the engine hears of the request."""
        self._own.begin(order)

    async def begin_others(self, order: Order) -> None:
        await asyncio.gather(*self._ask("begin", order))

    def send(self, attempt_id: AttemptId, chunk: Chunk, fence: Fence) -> None:
        """This rank's part: the others hear of their chunks from their own engines."""
        self._own.send(attempt_id, chunk, fence)

    async def finish(self, attempt_id: AttemptId) -> Sent:
        """Returns when every handle of every rank is done."""
        parts: list[Sent] = list(
            await asyncio.gather(self._own.finish(attempt_id), *self._ask("finish", attempt_id))
        )
        busy_s = max(part.busy_s for part in parts)
        return Sent(add_up([part.components for part in parts]), busy_s)

    def stop(self, attempt_id: AttemptId) -> None:
        self._own.stop(attempt_id)
        self._say("stop", attempt_id)

    async def revoke(self, attempt_id: AttemptId) -> None:
        """Returns when nothing of this attempt can be written any more, by any rank."""
        await _all_or_gone(self._own.revoke(attempt_id), *self._ask("revoke", attempt_id))

    def forget(self, attempt_id: AttemptId) -> None:
        self._own.forget(attempt_id)
        self._say("forget", attempt_id)

    async def transports(self) -> tuple[str, ...]:
        """What this rank's data plane writes with (see ``Plane.transports``)."""
        return await self._own.transports()

    async def digests(self, queries: Sequence[Query]) -> list[bytes]:
        """A component's digest each, over what all ranks hold. Raises ``DigestMismatch`` when they disagree."""
        held = await asyncio.gather(self._own.digests(queries), *self._ask("digests", queries))
        return [
            join_pieces(query.grain, [pieces[index] for pieces in held])
            for index, query in enumerate(queries)
        ]

    async def close(self) -> None:
        """End the I/O of every rank, after what it has posted has settled."""
        await _all_or_gone(self._own.close(), *self._ask("close"))

    def _ask(self, method: str, *args: object) -> list[asyncio.Future[Any]]:
        return [asyncio.ensure_future(rank.ask(method, *args)) for rank in self._others]

    def _say(self, method: str, *args: object) -> None:
        for rank in self._others:
            rank.say(method, *args)


async def _all_or_gone(*calls: Awaitable[None]) -> None:
    """Wait for all, also behind one that fails. A rank that is gone has nothing left to do but for its bytes
    that the kernels still have.
    """
    errors = await asyncio.gather(*calls, return_exceptions=True)
    if any(isinstance(error, RankLost) for error in errors):
        await asyncio.sleep(_UNCLEAN_WAIT_S)
    for error in errors:
        if error is not None and not isinstance(error, RankLost):
            raise error
