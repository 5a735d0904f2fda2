"""The life of an attempt on prefill: compute, push into the grant, report, and let go only when settled."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from services.prefill.metering import PrefillMetrics
from services.prefill.peers import DecodePeer
from services.sides import Sides
from sluice.engine.facade import EngineFacade
from sluice.engine.outputs import ChunkReady, PrefillOutcome
from sluice.errors import Aborted, BadRequest, DeadlineExceeded, SluiceError, as_sluice_error
from sluice.layout.reshard import grain_of
from sluice.layout.span import live_ordinals, span
from sluice.pools.base import RequestTables, StateMemory
from sluice.telemetry.logging import get_logger
from sluice.transfer.faults import FaultPoint, Faults
from sluice.transfer.grant import AttemptEvent, AttemptState, StateMachine, new_attempt
from sluice.transfer.messages import AttemptComplete, AttemptStart, Moved, Timings
from sluice.transfer.sender import SentComponent
from sluice.transfer.side import Chunk, Order, Query
from sluice.types import AttemptId, Epoch, Request, RequestId

log = get_logger(__name__)
_REMEMBERED_ATTEMPTS = 10_000  # ended ids kept so that a replayed Start is refused


@dataclass
class _Attempt:
    start: AttemptStart
    peer: DecodePeer
    order: Order
    machine: StateMachine[AttemptState, AttemptEvent]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[AttemptComplete] | None = None
    tables: RequestTables | None = None
    began: float = field(default_factory=time.monotonic)
    computed_at: float = 0.0


class Attempts:
    """Owns every attempt of this pod. All methods run on the event loop.

    An attempt's pages are released when its handles have settled and at no other time: a handle that never
    settles keeps its pages, and ``writing`` says so.
    """

    def __init__(
        self,
        engine: EngineFacade,
        memory: StateMemory,
        sides: Sides,
        epoch: Epoch,
        faults: Faults,
        metrics: PrefillMetrics,
    ) -> None:
        self._engine = engine
        self._memory = memory
        self._sides = sides
        self._epoch = epoch
        self._faults = faults
        self._metrics = metrics
        self._live: dict[AttemptId, _Attempt] = {}
        self._ended: dict[AttemptId, None] = {}
        self._background: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._live)

    def writing(self, epoch: Epoch, attempts: Iterable[AttemptId]) -> frozenset[AttemptId]:
        """Which of these attempts of a decode pod may still write. Unknown ones can't: their ids never return."""
        for attempt in attempts:
            self._remember(attempt)
        return frozenset(
            a for a in attempts if a in self._live and self._live[a].start.decode_epoch == epoch
        )

    def begin(self, start: AttemptStart, peer: DecodePeer) -> None:
        """Admit an attempt. Raises ``BadRequest`` for a used id, ``SpanMismatch`` for a grant that doesn't fit."""
        if start.attempt_id in self._live or start.attempt_id in self._ended:
            raise BadRequest(
                f"attempt {start.attempt_id} was already used; a retry is a new attempt",
                field="attempt_id",
                stage="grant",
            )
        order = Order(
            start.attempt_id,
            peer.epoch,
            {grant.component: grant.runs for grant in start.grants},
            length=len(start.prompt),
            have=start.have_tokens,
            deadline_s=start.timeout_s,
            withhold=self._faults.withhold,
            measure=start.measure,
        )
        self._sides.begin(order)
        attempt = _Attempt(start, peer, order, new_attempt(start.attempt_id))
        log.info("attempt_started", prompt_tokens=len(start.prompt))
        peer.attempts.add(start.attempt_id)
        self._live[start.attempt_id] = attempt

    async def run(self, attempt_id: AttemptId) -> AttemptComplete:
        """Serve an admitted attempt to its end.

        Raises a typed error only after everything it posted has settled, so that the peer may reuse its rows.
        """
        attempt = self._live.get(attempt_id)
        if attempt is None or not attempt.machine.can(AttemptEvent.COMPLETE):
            raise Aborted(f"attempt {attempt_id} was revoked before it began", stage="prefill")
        task = attempt.task = asyncio.create_task(self._serve(attempt))
        outcome = "cancelled"
        try:
            complete = await asyncio.shield(task)
            outcome = "complete"
        except asyncio.CancelledError:
            if task.cancelled() and not _being_cancelled():  # revoked; our caller still listens
                await attempt.ended.wait()
                raise Aborted(f"attempt {attempt_id} was revoked", stage="prefill") from None
            self.revoke_soon(attempt_id)
            raise
        except Exception as error:
            outcome = as_sluice_error(error).code
            await self._settled(attempt, AttemptEvent.FAIL)
            raise as_sluice_error(error, stage="prefill") from error
        finally:
            self._metrics.attempt_ended(outcome)
            log.info("attempt_ended", outcome=outcome)
        if not attempt.machine.can(AttemptEvent.COMPLETE):  # revoked while the last handle settled
            await attempt.ended.wait()
            raise Aborted(f"attempt {attempt_id} was revoked", stage="prefill")
        await self._settled(attempt, AttemptEvent.COMPLETE)
        return complete

    async def revoke(self, attempt_id: AttemptId) -> None:
        """Stop writing; returns when nothing of this attempt can be written any more. Idempotent."""
        attempt = self._live.get(attempt_id)
        if attempt is not None:
            await self._settled(attempt, AttemptEvent.REVOKE)

    def revoke_soon(self, attempt_id: AttemptId) -> None:
        """The same in the background, for a stream that broke: nobody is left to hear the answer."""
        attempt = self._live.get(attempt_id)
        if attempt is not None:
            self._settle_soon(attempt, AttemptEvent.REVOKE)

    async def drain(self, timeout_s: float) -> None:
        """At shutdown: let running attempts finish, then revoke what is left."""
        await self._wait_ended(timeout_s)
        for attempt_id in list(self._live):
            self.revoke_soon(attempt_id)
        await self._wait_ended(timeout_s)

    async def _wait_ended(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(attempt.ended.wait() for attempt in self._live.values()))

    async def _serve(self, attempt: _Attempt) -> AttemptComplete:
        start = attempt.start
        await self._faults.reach(FaultPoint.PREFILL_STARTED)
        try:
            async with asyncio.timeout(start.timeout_s):
                await self._sides.begin_others(attempt.order)
                outcome = await self._engine.prefill(self._request(start), self._on_chunk(attempt))
                sent = await self._sides.finish(start.attempt_id)
                transfer_s = time.monotonic() - attempt.computed_at
                reports = await self._reports(attempt, sent.components)
                await self._faults.reach(FaultPoint.PREFILL_COMPLETE)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"attempt {start.attempt_id} was not done within {start.timeout_s:.1f} s",
                stage="prefill",
                remedy="raise the request's timeout or add prefill capacity",
            ) from error
        complete = self._complete(attempt, outcome, transfer_s, reports)
        if start.measure:
            complete = replace(complete, transport=", ".join(await self._sides.transports()))
        self._metrics.completed(complete, sent.busy_s)
        return complete

    def _complete(
        self,
        attempt: _Attempt,
        outcome: PrefillOutcome,
        transfer_s: float,
        reports: tuple[Moved, ...],
    ) -> AttemptComplete:
        start = attempt.start
        # From Start's arrival, so that the two threads' way to each other is counted and the parts have no gap.
        queue_s = attempt.computed_at - attempt.began - outcome.prefill_s
        return AttemptComplete(
            attempt_id=start.attempt_id,
            prefill_epoch=self._epoch,
            first_token=outcome.first_token,
            prompt_tokens=len(start.prompt),
            cached_tokens=outcome.cached_tokens,
            timings=Timings(queue_s, outcome.prefill_s, transfer_s),
            components=reports,
            first_logprobs=outcome.first_logprobs,
            prompt_logprobs=outcome.prompt_logprobs,
        )

    def _request(self, start: AttemptStart) -> Request:
        # The attempt's id, not the request's: a retry of the same request may overlap its predecessor here.
        return Request(RequestId(start.attempt_id), start.prompt, start.sampling)

    def _on_chunk(self, attempt: _Attempt) -> Callable[[ChunkReady], None]:
        """Called on the step thread after each chunk's compute."""

        def on_chunk(chunk: ChunkReady) -> None:
            attempt.tables = chunk.tables
            attempt.computed_at = time.monotonic()
            what = Chunk(chunk.tables, chunk.start, chunk.stop, chunk.final)
            self._sides.send(attempt.start.attempt_id, what, chunk.fence)
            if not chunk.final:
                self._faults.reach_blocking(FaultPoint.PREFILL_CHUNK)

        return on_chunk

    async def _reports(self, attempt: _Attempt, sent: Sequence[SentComponent]) -> tuple[Moved, ...]:
        digests: dict[str, bytes] = {}
        if attempt.start.want_digests and attempt.tables is not None:
            # Rows of this attempt don't change between its last chunk and its release.
            queries = self._queries(attempt, attempt.tables)
            answers = await self._sides.digests(queries)
            digests = {q.component: one for q, one in zip(queries, answers, strict=True)}
        return tuple(
            Moved(
                item.component.name,
                item.num_rows,
                item.num_bytes,
                digests.get(item.component.name, b""),
                item.seconds,
            )
            for item in sent
        )

    def _queries(self, attempt: _Attempt, tables: RequestTables) -> list[Query]:
        start = attempt.start
        length, have = len(start.prompt), start.have_tokens
        return [
            Query(
                plan.name,
                grain_of(plan),
                span(plan.prefill, tables, length, have),
                live_ordinals(plan.prefill, length, have).start,
            )
            for plan in attempt.peer.agreement.plans
            if plan.name not in self._faults.withhold
        ]

    async def _settled(self, attempt: _Attempt, event: AttemptEvent) -> None:
        self._settle_soon(attempt, event)
        await attempt.ended.wait()

    def _settle_soon(self, attempt: _Attempt, event: AttemptEvent) -> None:
        """Settle in a task of its own, so that no caller's cancellation can stop it halfway. First event wins."""
        if not attempt.machine.can(event):
            return
        attempt.machine.apply(event)
        settle = self._end if event is AttemptEvent.COMPLETE else self._drain_one
        task = asyncio.create_task(settle(attempt))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _drain_one(self, attempt: _Attempt) -> None:
        """Compute nothing more, post nothing more, wait for posted handles, free."""
        self._sides.stop(
            attempt.start.attempt_id
        )  # before the step that runs can hand it another chunk
        with contextlib.suppress(SluiceError):  # a dead engine computes nothing either
            await self._engine.abort(RequestId(attempt.start.attempt_id))
        try:
            await self._sides.revoke(attempt.start.attempt_id)
        except SluiceError as error:
            # The I/O thread died with handles open. The rows stay held, and health says that only a restart helps.
            log.error("attempt_unsettled", attempt_id=attempt.start.attempt_id, error=str(error))
            return
        if attempt.task is not None:
            attempt.task.cancel()
            await asyncio.wait([attempt.task])
        attempt.machine.apply(AttemptEvent.SETTLED)
        await self._end(attempt)

    async def _end(self, attempt: _Attempt) -> None:
        attempt_id = attempt.start.attempt_id
        with contextlib.suppress(SluiceError):
            await self._engine.release(RequestId(attempt_id))
        self._sides.forget(attempt_id)
        del self._live[attempt_id]
        self._remember(attempt_id)
        attempt.peer.attempts.discard(attempt_id)
        attempt.ended.set()

    def _remember(self, attempt_id: AttemptId) -> None:
        self._ended[attempt_id] = None
        while len(self._ended) > _REMEMBERED_ATTEMPTS:
            del self._ended[next(iter(self._ended))]


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
