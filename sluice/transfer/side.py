"""One rank's end of its pod's transfers: links to the peer's ranks, and an attempt's writes on each of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from sluice.errors import PeerLost, SluiceError, as_sluice_error
from sluice.layout.component import Component
from sluice.layout.outcome import ComponentPlan
from sluice.layout.reshard import Grain, reshard
from sluice.layout.span import Run, Tables
from sluice.pools.base import StateMemory
from sluice.transfer.pieces import Piece, digest_pieces
from sluice.transfer.plane import Endpoint
from sluice.transfer.sender import Route, Sender, SentComponent
from sluice.transfer.ticket import running_future
from sluice.transfer.worker import TransferWorker
from sluice.types import AttemptId, Epoch

Fence = Callable[[], None]


@dataclass(frozen=True)
class Place:
    """Which rank of how many."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class Meeting:
    """What a rank needs to know of a decode pod to write into it."""

    epoch: Epoch
    plans: tuple[ComponentPlan, ...]
    endpoints: tuple[Endpoint, ...]  # by decode rank


@dataclass(frozen=True)
class Order:
    """What an attempt may write where. Every rank gets the same one; grants count rows of all ranks together."""

    attempt_id: AttemptId
    epoch: Epoch
    grants: Mapping[str, tuple[Run, ...]]
    length: int
    have: int
    deadline_s: float
    withhold: frozenset[str]
    measure: bool


@dataclass(frozen=True)
class Chunk:
    """A computed chunk's place in its prompt (see ``engine.outputs.ChunkReady``)."""

    tables: Tables
    start: int
    stop: int
    final: bool


@dataclass(frozen=True)
class Sent:
    """What one rank moved of an attempt; ``busy_s`` is the time its links were busy with it."""

    components: tuple[SentComponent, ...]
    busy_s: float


@dataclass(frozen=True)
class Query:
    """Rows whose pieces are to be digested; the first of them is ``first_ordinal``."""

    component: str
    grain: Grain
    runs: tuple[Run, ...]
    first_ordinal: int


class RankSide:
    """``send`` runs on the step thread, everything else on an event loop."""

    def __init__(self, place: Place, memory: StateMemory, worker: TransferWorker) -> None:
        self._place = place
        self._memory = memory
        self._worker = worker
        self._routes: dict[Epoch, tuple[Route, ...]] = {}
        self._senders: dict[AttemptId, tuple[Sender, ...]] = {}
        self._handed: dict[AttemptId, Future[None]] = {}  # done when the last chunk was handed over
        self._errors: dict[AttemptId, SluiceError] = {}
        self._lock = threading.Lock()  # guards _senders against the step thread

    async def connect(self, meeting: Meeting) -> None:
        """Reach the decode ranks that this one writes to. Raises ``PeerLost`` or ``TransferFailed``."""
        routes: list[Route] = []
        for pairing in reshard(meeting.plans, self._place.size, len(meeting.endpoints)):
            if pairing.source == self._place.rank:
                endpoint = meeting.endpoints[pairing.target]
                link = await asyncio.wrap_future(self._worker.connect(endpoint))
                shares = {share.component: share for share in pairing.shares}
                ours, theirs = self._memory.regions(), endpoint.regions
                routes.append(Route(link, meeting.plans, ours, theirs, shares))
        self._routes[meeting.epoch] = tuple(routes)

    async def lost(self, epoch: Epoch) -> bool:
        """Whether a link to this decode pod broke."""
        return any(route.link.lost for route in self._routes.get(epoch, ()))

    async def disconnect(self, epoch: Epoch) -> None:
        for route in self._routes.pop(epoch, ()):
            await asyncio.wrap_future(self._worker.disconnect(route.link))

    def begin(self, order: Order) -> None:
        """Raises ``SpanMismatch`` for a grant that doesn't fit, ``PeerLost`` where ``connect`` wasn't called."""
        routes = self._routes.get(order.epoch)
        if routes is None:
            raise PeerLost(f"no link to decode epoch {order.epoch}", stage="grant")
        senders = tuple(
            Sender(
                self._worker,
                route,
                order.grants,
                length=order.length,
                have=order.have,
                deadline_s=order.deadline_s,
                withhold=order.withhold,
                measure=order.measure,
            )
            for route in routes
        )
        with self._lock:
            self._senders[order.attempt_id] = senders
            self._handed[order.attempt_id] = running_future()

    def send(self, attempt_id: AttemptId, chunk: Chunk, fence: Fence) -> None:
        """Hand a computed chunk to the links. Never raises: ranks must go on alike; ``finish`` does."""
        with self._lock:
            senders = self._senders.get(attempt_id, ())
        try:
            for sender in senders:
                sender.send(chunk.tables, chunk.start, chunk.stop, chunk.final, fence)
        except Exception as error:
            self._errors.setdefault(attempt_id, as_sluice_error(error, stage="transfer"))
        if chunk.final:
            self._all_handed(attempt_id)

    async def finish(self, attempt_id: AttemptId) -> Sent:
        """Wait until this rank has computed the prompt, which may be later than rank 0, and every byte is
        visible at the peer; raises the first typed error.
        """
        senders = self._senders.get(attempt_id, ())
        if (handed := self._handed.get(attempt_id)) is not None:
            await asyncio.wrap_future(handed)
        if (error := self._errors.get(attempt_id)) is not None:
            raise error
        for sender in senders:
            await sender.finish()
        busy_s = max((sender.busy_s for sender in senders), default=0.0)
        return Sent(add_up([sender.sent() for sender in senders]), busy_s)

    def stop(self, attempt_id: AttemptId) -> None:
        """Post nothing more. What was posted is on its way; ``revoke`` waits for it."""
        for sender in self._senders.get(attempt_id, ()):
            sender.stop()
        self._all_handed(attempt_id)

    async def revoke(self, attempt_id: AttemptId) -> None:
        """Post nothing more; returns when nothing of this attempt can be written any more."""
        for sender in self._senders.get(attempt_id, ()):
            await sender.revoke()

    def forget(self, attempt_id: AttemptId) -> None:
        with self._lock:
            self._senders.pop(attempt_id, None)
            self._errors.pop(attempt_id, None)
            self._handed.pop(attempt_id, None)

    async def close(self) -> None:
        """End all I/O, after what was posted has settled. Idempotent."""
        await asyncio.to_thread(self._worker.close)

    async def transports(self) -> tuple[str, ...]:
        """See ``Plane.transports``."""
        return await asyncio.wrap_future(self._worker.transports())

    def _all_handed(self, attempt_id: AttemptId) -> None:
        """No chunk of the attempt will come any more."""
        with self._lock:
            handed = self._handed.get(attempt_id)
            if handed is not None and not handed.done():
                handed.set_result(None)

    async def digests(self, queries: Sequence[Query]) -> list[dict[Piece, bytes]]:
        """The pieces that this rank holds, for each query. The rows must not change meanwhile."""
        return await asyncio.to_thread(lambda: [self._pieces(query) for query in queries])

    def _pieces(self, query: Query) -> dict[Piece, bytes]:
        component: Component = self._memory.component(query.component)
        size, rank = self._place.size, self._place.rank
        return digest_pieces(
            self._memory, component, query.grain, query.runs, query.first_ordinal, size, rank
        )


def add_up(parts: Sequence[tuple[SentComponent, ...]]) -> tuple[SentComponent, ...]:
    """One report of several: bytes add up, rows are the same ones, the slowest link's time counts."""
    return tuple(
        SentComponent(
            same[0].component,
            max(one.num_rows for one in same),
            sum(one.num_bytes for one in same),
            max(one.seconds for one in same),
        )
        for same in zip(*(part for part in parts if part), strict=True)
    )
