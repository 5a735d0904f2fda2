"""The life of an attempt on decode: reserve, grant, wait for proof that state arrived, adopt, stream, give back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from services.decode.ledger import Ledger
from services.decode.metering import DecodeMetrics
from services.decode.peer import Held, Peer
from services.decode.peers import Peers
from services.decode.proof import Proof
from services.decode.proving import RESERVING
from services.sides import Sides
from sluice.engine.facade import EngineFacade
from sluice.engine.outputs import Reservation
from sluice.engine.streams import TokenStream
from sluice.errors import (
    Aborted,
    DeadlineExceeded,
    Overloaded,
    PeerLost,
    SluiceError,
    StaleEpoch,
    as_sluice_error,
)
from sluice.layout.negotiate import Agreement
from sluice.layout.span import span
from sluice.pools.base import StateMemory
from sluice.rpc.messages import Event, Finished, GenerateCall, PromptScored, Tokens, Usage
from sluice.rpc.prefill_link import AttemptStream
from sluice.telemetry.logging import get_logger
from sluice.transfer.faults import FaultPoint, Faults
from sluice.transfer.grant import GrantEvent, GrantState, StateMachine, new_grant
from sluice.transfer.messages import AttemptComplete, AttemptStart, ComponentGrant, Timings
from sluice.types import Epoch, FinishReason, Request, RequestId, TokenEvent

log = get_logger(__name__)
_DRAIN_TIMEOUT_S = 2.0  # how long an abort waits for Drained before the rows are quarantined


@dataclass
class _Attempt:
    call: GenerateCall
    peer: Peer
    epoch: Epoch  # of the peer when the attempt began; it and the agreement hold for the attempt's whole life
    agreement: Agreement
    deadline_s: float  # monotonic
    reservation: Reservation
    want_digests: bool
    measure: bool  # how long each component takes, for a canary
    grant: StateMachine[GrantState, GrantEvent]
    ledger: Ledger
    stream: AttemptStream | None = None

    @property
    def engine_id(self) -> RequestId:
        return self.reservation.request.request_id

    def left_s(self) -> float:
        return max(0.0, self.deadline_s - time.monotonic())


class Attempts:
    """Owns every attempt of this pod. All methods run on the event loop.

    Rows of a reservation are given back in exactly one of three ways: by the engine when an adopted request ends,
    here when the grant is settled, or by ``Peers`` when a quarantine ends.
    """

    def __init__(
        self,
        engine: EngineFacade,
        memory: StateMemory,
        sides: Sides,
        peers: Peers,
        epoch: Epoch,
        faults: Faults,
        metrics: DecodeMetrics,
        *,
        want_digests: bool,
    ) -> None:
        self._engine = engine
        self._memory = memory
        self._peers = peers
        self._epoch = epoch
        self._faults = faults
        self._metrics = metrics
        self._proof = Proof(memory, sides, faults)
        self._want_digests = want_digests
        self._background: set[asyncio.Task[None]] = set()
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Event]:
        """Stream one request. Closing the iterator aborts it on both pods; errors are typed."""
        self._running += 1
        self._idle.clear()
        outcome = "cancelled"  # unless something better is known: the caller went away
        log.info("attempt_started", prefill=call.prefill_address, prompt_tokens=len(call.prompt))
        try:
            attempt = await self._reserve(call, proving=False)
            complete = await self._prefilled(attempt)
            attempt.peer.served += 1
            events = await self._adopt(attempt, complete)
            async with aclosing(self._stream(attempt, complete, events)) as messages:
                async for message in messages:
                    if isinstance(message, Finished):
                        outcome = message.reason.value
                    yield message
        except Exception as error:
            outcome = as_sluice_error(error).code
            raise
        finally:
            self._metrics.attempt_ended(outcome)
            log.info("attempt_ended", outcome=outcome)
            self._running -= 1
            if self._running == 0:
                self._idle.set()

    async def canary(self, call: GenerateCall) -> AttemptComplete:
        """Move every component for a synthetic prompt and prove it, without decoding."""
        attempt = await self._reserve(call, proving=True)
        complete = await self._prefilled(attempt)
        await self._engine.release(attempt.engine_id)
        return complete

    async def drain(self, timeout_s: float) -> None:
        """At shutdown: let streams finish, then wait for what they left behind."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                if self._background:
                    await asyncio.wait(self._background)

    # -- before the state has arrived -----------------------------------------------------------------------

    async def _reserve(self, call: GenerateCall, *, proving: bool) -> _Attempt:
        ledger = Ledger()
        deadline_s = ledger.arrived + call.timeout_s
        if call.decode_epoch and call.decode_epoch != self._epoch:
            raise StaleEpoch(
                f"the request is for decode epoch {call.decode_epoch}, this is {self._epoch}",
                stage="pairing",
                remedy="choose a pair anew",
            )
        peer, agreement = self._peers.require(
            call.prefill_address,
            proving=proving,
            epoch=call.prefill_epoch,
            digest=call.agreement_digest,
        )
        epoch = peer.epoch
        await self._faults.reach(FaultPoint.DECODE_QUEUED)
        request = Request(RequestId(call.attempt_id), call.prompt, call.sampling)
        peer.users.add(call.attempt_id)
        try:
            reservation = await self._engine.reserve(request, call.timeout_s)
        except BaseException as error:
            peer.users.discard(call.attempt_id)
            if isinstance(error, Overloaded):
                error.stage = RESERVING  # ours, not the prefill's
            raise
        return _Attempt(
            call,
            peer,
            epoch,
            agreement,
            deadline_s,
            reservation,
            self._want_digests or proving,
            proving,
            new_grant(call.attempt_id),
            ledger,
        )

    async def _prefilled(self, attempt: _Attempt) -> AttemptComplete:
        """Returns with the grant settled and the state proven; on any error the rows are wound down."""
        try:
            async with asyncio.timeout(attempt.left_s()):
                await self._faults.reach(FaultPoint.DECODE_GRANTED)
                complete = await self._run(attempt)
                attempt.ledger.completed = time.monotonic()
                await self._proof.check(
                    complete,
                    attempt.agreement,
                    attempt.reservation.tables,
                    len(attempt.call.prompt),
                    digests=attempt.want_digests,
                )
                attempt.ledger.proven = time.monotonic()
                attempt.peer.users.discard(attempt.call.attempt_id)
                self._metrics.crossed(complete.components)
                return complete
        except BaseException as error:
            # In the background: the client's answer must not wait for the peer to drain.
            self._spawn_wind_down(attempt)
            if isinstance(error, TimeoutError):
                raise self._late(attempt, "prefill") from error
            raise

    async def _run(self, attempt: _Attempt) -> AttemptComplete:
        """Open the stream and wait for Complete, for a settled failure, or for the peer to be lost."""
        if attempt.epoch != attempt.peer.epoch:
            raise StaleEpoch(f"prefill {attempt.peer.address} changed", stage="grant")
        start = self._start(attempt)
        attempt.ledger.started = time.monotonic()
        attempt.stream = attempt.peer.link.run(start, attempt.left_s() + _DRAIN_TIMEOUT_S)
        answer = await self._outcome_or_lost(attempt.stream, attempt.peer)
        if isinstance(answer, SluiceError):
            attempt.grant.apply(GrantEvent.FAILED)
            raise answer
        if answer is None:
            raise Aborted("prefill drained an attempt that nobody aborted", stage="transfer")
        if (answer.attempt_id, answer.prefill_epoch) != (attempt.call.attempt_id, attempt.epoch):
            raise StaleEpoch(
                f"Complete is for {answer.attempt_id} of epoch {answer.prefill_epoch}, "
                f"expected {attempt.call.attempt_id} of {attempt.epoch}",
                stage="transfer",
            )
        attempt.grant.apply(GrantEvent.COMPLETE)
        return answer

    async def _outcome_or_lost(
        self, stream: AttemptStream, peer: Peer
    ) -> AttemptComplete | SluiceError | None:
        outcome = asyncio.create_task(stream.outcome())
        lost = asyncio.create_task(peer.lost.wait())
        try:
            await asyncio.wait([outcome, lost], return_when=asyncio.FIRST_COMPLETED)
            if outcome.done():
                return outcome.result()
            raise PeerLost(f"prefill {peer.address} was lost: {peer.reason}", stage="transfer")
        finally:
            outcome.cancel()
            lost.cancel()

    def _start(self, attempt: _Attempt) -> AttemptStart:
        call, tables = attempt.call, attempt.reservation.tables
        return AttemptStart(
            attempt_id=call.attempt_id,
            request_id=call.request_id,
            decode_epoch=self._epoch,
            prefill_epoch=attempt.epoch,
            agreement_digest=attempt.agreement.digest,
            prompt=call.prompt,
            sampling=call.sampling,
            timeout_s=attempt.left_s(),
            have_tokens=0,
            grants=tuple(
                ComponentGrant(name, span(self._memory.component(name), tables, len(call.prompt)))
                for name in attempt.agreement.components
            ),
            want_digests=attempt.want_digests,
            measure=attempt.measure,
        )

    # -- winding down ---------------------------------------------------------------------------------------

    def _spawn_wind_down(self, attempt: _Attempt) -> None:
        task = asyncio.create_task(self._wind_down(attempt))
        self._background.add(task)
        task.add_done_callback(functools.partial(self._wound_down, attempt))

    def _wound_down(self, attempt: _Attempt, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        attempt.peer.users.discard(attempt.call.attempt_id)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("wind_down_failed", error=repr(error))

    async def _wind_down(self, attempt: _Attempt) -> None:
        """Give the rows back, or quarantine them while the peer may still write."""
        if attempt.stream is None:  # Start was never said: nobody may write
            attempt.grant.apply(GrantEvent.FAILED)
        elif attempt.grant.state is GrantState.ISSUED:
            await self._abort(attempt, attempt.stream)
        if attempt.stream is not None:
            attempt.stream.cancel()
        if attempt.grant.state is GrantState.SETTLED:
            await self._engine.release(attempt.engine_id)
            return
        await self._engine.quarantine(attempt.engine_id)
        self._peers.hold(
            attempt.peer,
            attempt.call.attempt_id,
            Held(
                attempt.grant,
                attempt.epoch,
                lambda: self._engine.release(attempt.engine_id),
            ),
        )

    async def _abort(self, attempt: _Attempt, stream: AttemptStream) -> None:
        attempt.grant.apply(GrantEvent.ABORT)
        try:
            async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                answer = await stream.abort("decode gave up")
        except Exception as error:  # whatever it was, nothing is known: the rows are quarantined
            log.warning("abort_unanswered", attempt_id=attempt.call.attempt_id, error=str(error))
            return
        if answer is None:
            attempt.grant.apply(GrantEvent.DRAINED)
        elif isinstance(answer, SluiceError):
            attempt.grant.apply(GrantEvent.FAILED)
        else:
            attempt.grant.apply(GrantEvent.COMPLETE)

    # -- after the state has arrived ------------------------------------------------------------------------

    async def _adopt(self, attempt: _Attempt, complete: AttemptComplete) -> TokenStream:
        """From here on the engine owns the rows; until here a cancelled request gives them back itself."""
        try:
            await self._faults.reach(FaultPoint.DECODE_ADOPTED)
            return self._engine.adopt(
                attempt.engine_id,
                complete.first_token,
                attempt.agreement.draft_valid,
                complete.first_logprobs,
            )
        except BaseException:
            self._spawn_wind_down(attempt)
            raise

    async def _stream(
        self, attempt: _Attempt, complete: AttemptComplete, events: TokenStream
    ) -> AsyncGenerator[Event]:
        tokens = steps = accepted = 0
        timings: Timings | None = None
        last = 0.0
        try:
            if complete.prompt_logprobs is not None:
                yield PromptScored(complete.prompt_logprobs)
            while True:
                event = await self._next_event(attempt, events)
                tokens += len(event.token_ids)
                steps += event.accepted_drafts is not None
                accepted += event.accepted_drafts or 0
                now, before = time.monotonic(), last
                last = now
                if timings is None:
                    timings = attempt.ledger.timings(complete.timings, now)
                    self._metrics.first_token(timings)
                    yield Tokens(event.token_ids, None, event.logprobs, timings)
                else:
                    self._metrics.step(now - before, len(event.token_ids), event.accepted_drafts)
                    yield Tokens(event.token_ids, event.accepted_drafts, event.logprobs)
                if event.finish_reason is not None:
                    self._metrics.finished(now - attempt.ledger.arrived)
                    usage = self._usage(complete, timings, tokens, steps, accepted)
                    yield Finished(self._reason(event.finish_reason), usage)
                    return
        finally:
            await events.aclose()

    async def _next_event(self, attempt: _Attempt, events: TokenStream) -> TokenEvent:
        try:
            async with asyncio.timeout(attempt.left_s()):
                return await anext(events)
        except TimeoutError as error:
            raise self._late(attempt, "decode") from error

    def _reason(self, reason: FinishReason) -> FinishReason:
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            return reason
        raise Aborted("the request was aborted while decoding", stage="decode")

    def _usage(
        self, complete: AttemptComplete, timings: Timings, tokens: int, steps: int, accepted: int
    ) -> Usage:
        return Usage(
            prompt_tokens=complete.prompt_tokens,
            cached_tokens=complete.cached_tokens,
            completion_tokens=tokens,
            verify_steps=steps,
            accepted_drafts=accepted,
            timings=timings,
            components=complete.components,
        )

    def _late(self, attempt: _Attempt, stage: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"not done within {attempt.call.timeout_s:.1f} s",
            stage=stage,
            remedy="raise the request's timeout or add capacity",
        )
