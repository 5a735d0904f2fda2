"""One attempt's push: from chunks that were computed to rows inside the peer's grant, and to nothing outside it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sluice.errors import Aborted, SpanMismatch, TransferFailed
from sluice.layout.component import Component, Coverage
from sluice.layout.outcome import ComponentPlan
from sluice.layout.reshard import Share
from sluice.layout.span import (
    Run,
    Tables,
    count_rows,
    live_ordinals,
    runs_of,
    slice_runs,
    span,
)
from sluice.pools.base import Region
from sluice.transfer.plane import Link, Movement
from sluice.transfer.worker import Ticket, TransferWorker
from sluice.transfer.writes import count_bytes, plan_writes

_UNCLEAN_WAIT_S = 1.0


@dataclass(frozen=True)
class SentComponent:
    """What moved of one component: rows and bytes (0 where the fault switch withheld it)."""

    component: Component
    num_rows: int
    num_bytes: int
    seconds: float = 0.0  # on the wire, when measured


@dataclass(frozen=True)
class Route:
    """What is fixed for every attempt between one pair: agreed components, both sides' regions, the link."""

    link: Link
    plans: tuple[ComponentPlan, ...]
    source_regions: tuple[Region, ...]
    target_regions: tuple[Region, ...]
    # What of each component; None: whole rows of all of them.
    shares: Mapping[str, Share] | None = None


class Sender:
    """Plans and submits the writes of one attempt.

    ``send`` runs on the engine's step thread (reads tables, enqueues, never blocks); ``finish`` and ``revoke`` on
    the event loop. History rows go with the chunk that closed them; windows, tails and the draft's state go with
    the last chunk, because only then do they hold what the first decode step reads.

    Raises ``SpanMismatch`` at construction when the grant doesn't hold exactly the rows this side counts.
    """

    def __init__(
        self,
        worker: TransferWorker,
        route: Route,
        grants: Mapping[str, tuple[Run, ...]],
        *,
        length: int,
        have: int = 0,
        deadline_s: float,
        withhold: frozenset[str] = frozenset(),
        measure: bool = False,
    ) -> None:
        self._worker = worker
        self._route = route
        self._grants = grants
        self._length = length
        self._have = have
        self._deadline_s = deadline_s
        self._withhold = withhold
        self._measure = measure
        self._waiting: dict[
            str, list[Movement]
        ] = {}  # when measured: by component, sent by ``finish``
        self._fence: Callable[[], None] | None = None
        self._seconds: dict[str, float] = {}
        # Of all transfers, from first post to last acknowledgement; valid after ``finish``.
        self.busy_s = 0.0
        self._lock = threading.Lock()
        self._revoked = False
        self._sources = tuple(plan.prefill for plan in route.plans)
        self._targets = {plan.name: plan.decode for plan in route.plans}
        self._sent_rows = {component.name: 0 for component in self._sources}
        self._sent_bytes = dict(self._sent_rows)
        self._tickets: list[Ticket] = []
        self._check_grants()

    def _check_grants(self) -> None:
        agreed = [plan.name for plan in self._route.plans]
        if set(agreed) != set(self._grants):
            raise SpanMismatch(
                f"grant names {sorted(self._grants)}, agreement names {sorted(agreed)}",
                stage="grant",
                remedy="both pods must use the agreement of the same handshake",
            )
        for component in self._sources:
            expected = len(live_ordinals(component, self._length, self._have))
            granted = count_rows(self._grants[component.name])
            if expected != granted:
                raise SpanMismatch(
                    f"{component.name}: prefill counts {expected} rows for {self._length} tokens, "
                    f"the grant holds {granted}",
                    stage="grant",
                )

    def send(
        self, tables: Tables, start: int, stop: int, final: bool, fence: Callable[[], None]
    ) -> None:
        """Submit what positions ``start .. stop`` made final; on the last chunk everything that is left."""
        writes: list[Movement] = []
        for component in self._sources:
            new = self._writes(component, tables, start, stop, final)
            if self._measure:
                self._waiting.setdefault(component.name, []).extend(new)
            writes += new
        if self._measure:
            self._fence = fence
            return
        with self._lock:
            if self._revoked or not writes:
                return
            self._tickets.append(
                self._worker.submit(self._route.link, writes, fence, self._deadline_s)
            )

    def _writes(
        self, component: Component, tables: Tables, start: int, stop: int, final: bool
    ) -> Sequence[Movement]:
        if component.coverage is Coverage.HISTORY:
            ratio = component.tokens_per_row
            ordinals = range(max(start, self._have) // ratio, stop // ratio)
            source = runs_of(component, tables, ordinals)
            offset, first = ordinals.start - self._have // ratio, ordinals.start
        elif final:
            source = span(component, tables, self._length, self._have)
            offset = first = 0
        else:
            return ()
        if not source or component.name in self._withhold:
            return ()
        granted = slice_runs(self._grants[component.name], offset, count_rows(source))
        self._sent_rows[component.name] += count_rows(source)
        shares = self._route.shares
        share = None if shares is None else shares.get(component.name)
        if shares is not None and share is None:
            return ()  # other ranks write it
        writes = plan_writes(
            component,
            self._targets[component.name],
            source,
            granted,
            self._route.source_regions,
            self._route.target_regions,
            share=share,
            first_ordinal=first,
        )
        self._sent_bytes[component.name] += count_bytes(writes)
        return writes

    async def finish(self) -> None:
        """Wait until every byte is visible at the peer; raises the first ticket's typed error."""
        for name, writes in self._waiting.items():
            if writes:
                self._seconds[name] = await self._send_alone(writes)
        for ticket in self._tickets:
            self.busy_s += (await asyncio.wrap_future(ticket.future)).seconds
        for component in self._sources:
            sent, due = self._sent_rows[component.name], self._due_rows(component)
            if sent != due:
                raise TransferFailed(
                    f"{component.name}: {sent} of {due} rows were sent", stage="transfer"
                )

    async def _send_alone(self, writes: Sequence[Movement]) -> float:
        """Nothing else of this attempt is on its way meanwhile. Rows that are final stay so until the attempt ends."""
        with self._lock:
            if self._revoked:
                raise Aborted("the transfer was revoked", stage="transfer")
            fence, self._fence = self._fence, None
            ticket = self._worker.submit(self._route.link, writes, fence, self._deadline_s)
            self._tickets.append(ticket)
        return (await asyncio.wrap_future(ticket.future)).seconds

    def stop(self) -> None:
        """Post nothing more. What was posted is on its way; ``revoke`` waits for it."""
        with self._lock:
            self._revoked = True
            for ticket in self._tickets:
                ticket.revoke()

    async def revoke(self) -> None:
        """Post nothing more; returns when nothing of this attempt can be written any more.

        Raises when the I/O thread died with handles open: then nobody knows, and only the process's end helps.
        """
        self.stop()
        settled = [await asyncio.wrap_future(ticket.settled) for ticket in self._tickets]
        if not all(settlement.clean for settlement in settled):
            # The connection broke: bytes that the peer's kernel already has may still be placed, very soon.
            await asyncio.sleep(_UNCLEAN_WAIT_S)

    def sent(self) -> tuple[SentComponent, ...]:
        return tuple(
            SentComponent(
                component,
                self._sent_rows[component.name],
                self._sent_bytes[component.name],
                self._seconds.get(component.name, 0.0),
            )
            for component in self._sources
        )

    def _due_rows(self, component: Component) -> int:
        if component.name in self._withhold:
            return 0
        return len(live_ordinals(component, self._length, self._have))
