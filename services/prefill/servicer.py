"""The gRPC face of a prefill pod: converts, delegates to ``Peers`` and ``Attempts``, and maps failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from services.pod_metrics import Health
from services.prefill.attempts import Attempts
from services.prefill.peers import DecodePeer, Peers
from services.tracing import ids_of
from sluice.engine.facade import EngineFacade
from sluice.errors import Aborted, BadRequest, DeadlineExceeded, NotReady, SluiceError, StaleEpoch
from sluice.layout.layout import Layout
from sluice.layout.negotiate import Agreement
from sluice.rpc.convert import (
    endpoint_from_pb,
    failure_to_pb,
    layout_from_pb,
    layout_to_pb,
    mismatch_to_pb,
)
from sluice.rpc.convert_attempt import complete_to_pb, start_from_pb
from sluice.rpc.convert_decode import pod_layout_to_pb
from sluice.rpc.convert_status import prefill_status_to_pb
from sluice.rpc.messages import PodLayout, PrefillStatus, pool_statuses
from sluice.telemetry.logging import bind
from sluice.telemetry.tracing import Tracing
from sluice.transfer.messages import AttemptStart
from sluice.transfer.worker import TransferWorker
from sluice.types import AttemptId, Epoch
from sluice.v1 import layout_pb2, prefill_pb2, prefill_pb2_grpc

_START_TIMEOUT_S = 5.0  # between opening Run and saying Start

_PARTS = ("queue", "prefill", "transfer")  # of a Complete's timings

RunStream = AsyncIterator[prefill_pb2.RunRequest]

Context = aio.ServicerContext[Any, Any]


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Stateless itself; see the classes it is given."""

    def __init__(
        self,
        pod: PodLayout,
        peers: Peers,
        attempts: Attempts,
        engine: EngineFacade,
        worker: TransferWorker,
        tracing: Tracing,
        capacity: int = 0,
    ) -> None:
        self._pod = pod
        self._peers = peers
        self._attempts = attempts
        self._engine = engine
        self._worker = worker
        self._tracing = tracing
        self._capacity = capacity
        self.draining = False

    @property
    def _layout(self) -> Layout:
        return self._pod.layout

    async def GetLayout(
        self,
        request: layout_pb2.GetLayoutRequest,
        context: Context,
    ) -> layout_pb2.GetLayoutResponse:
        return pod_layout_to_pb(self._pod)

    async def Handshake(
        self,
        request: prefill_pb2.HandshakeRequest,
        context: Context,
    ) -> prefill_pb2.HandshakeResponse:
        self._refuse_if_dead("handshake")
        if self.draining:
            raise NotReady("this prefill pod is shutting down", stage="handshake")
        outcome = await self._peers.pair(
            layout_from_pb(request.layout),
            Epoch(request.epoch),
            tuple(endpoint_from_pb(endpoint) for endpoint in request.endpoints),
            allow_missing_draft=request.allow_missing_draft,
        )
        if isinstance(outcome, Agreement):
            digest, mismatches = outcome.digest, outcome.notes
        else:
            digest, mismatches = "", outcome.mismatches
        return prefill_pb2.HandshakeResponse(
            layout=layout_to_pb(self._layout),
            epoch=self._pod.epoch,
            agreement_digest=digest,
            mismatches=[mismatch_to_pb(mismatch) for mismatch in mismatches],
        )

    async def Ping(
        self,
        request: prefill_pb2.PingRequest,
        context: Context,
    ) -> prefill_pb2.PingResponse:
        self._refuse_if_dead("ping")
        return prefill_pb2.PingResponse(
            epoch=self._pod.epoch,
            paired=self._peers.seen(Epoch(request.epoch)),
            status=prefill_status_to_pb(self.status()),
        )

    async def GetStatus(
        self, request: prefill_pb2.GetStatusRequest, context: Context
    ) -> prefill_pb2.GetPrefillStatusResponse:
        return prefill_status_to_pb(self.status())

    async def Drain(
        self,
        request: prefill_pb2.DrainRequest,
        context: Context,
    ) -> prefill_pb2.DrainResponse:
        asked = [AttemptId(attempt) for attempt in request.attempt_ids]
        for attempt in asked:
            self._attempts.revoke_soon(attempt)
        await asyncio.sleep(0)
        writing = self._attempts.writing(Epoch(request.decode_epoch), asked)
        return prefill_pb2.DrainResponse(
            prefill_epoch=self._pod.epoch,
            drained=[attempt for attempt in asked if attempt not in writing],
            writing=sorted(writing),
        )

    async def Run(
        self,
        request_iterator: RunStream,
        context: Context,
    ) -> AsyncIterator[prefill_pb2.RunResponse]:
        start = await self._start(request_iterator)
        bind(request_id=start.request_id, attempt_id=start.attempt_id)  # of every line from here on
        try:
            peer = self._admit(start)
            self._attempts.begin(start, peer)
        except SluiceError as error:
            # Nothing was posted, so this is a settled failure like any other.
            yield prefill_pb2.RunResponse(failed=failure_to_pb(error))
            return
        try:
            yield prefill_pb2.RunResponse(accepted=prefill_pb2.Accepted())
            with self._tracing.span("prefill.run", **ids_of(start)):
                answer = await self._serve(start.attempt_id, request_iterator)
                if answer.HasField("complete"):
                    timings = answer.complete.timings
                    seconds = (timings.queue_s, timings.prefill_s, timings.transfer_s)
                    self._tracing.parts(_PARTS, seconds)
            yield answer
        finally:  # a stream that broke leaves no attempt behind
            self._attempts.revoke_soon(start.attempt_id)

    def status(self) -> PrefillStatus:
        """As of the last step; never waits."""
        stats, dead = self._engine.latest_stats, self._dead()
        return PrefillStatus(
            epoch=self._pod.epoch,
            ready=not self.draining and dead is None,
            reason=f"a thread died: {dead}" if dead else "shutting down" * self.draining,
            queued=stats.queued,
            running=stats.running,
            paired=len(self._peers),
            attempts=len(self._attempts),
            pools=pool_statuses(stats.occupancy, self._pod.layout),
            capacity=self._capacity,
        )

    def health(self) -> Health:
        reason = self.status().reason
        unpaired = "" if len(self._peers) else "no decode pod has agreed yet"
        return Health(reason if self._dead() else "", reason or unpaired)

    def _dead(self) -> BaseException | None:
        """Why this pod can do nothing more, if a thread of it died."""
        return self._engine.failed or self._worker.failed

    def _refuse_if_dead(self, stage: str) -> None:
        if (dead := self._dead()) is not None:
            raise NotReady(f"a thread of this pod died: {dead}", stage=stage, remedy="restart it")

    async def _start(self, stream: RunStream) -> AttemptStart:
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                first = await anext(stream)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no Start within {_START_TIMEOUT_S} s", stage="run") from error
        except StopAsyncIteration as error:
            raise BadRequest("Run was closed before Start", field="start", stage="run") from error
        if first.WhichOneof("message") != "start":
            raise BadRequest("the first message of Run must be Start", field="start", stage="run")
        return start_from_pb(first.start)

    def _admit(self, start: AttemptStart) -> DecodePeer:
        if self.draining:
            raise NotReady("this prefill pod is shutting down", stage="run")
        if start.prefill_epoch != self._pod.epoch:
            raise StaleEpoch(
                f"Start is for prefill epoch {start.prefill_epoch}, this is {self._pod.epoch}",
                stage="run",
                remedy="decode must repeat the handshake",
            )
        return self._peers.require(start.decode_epoch, start.agreement_digest)

    async def _serve(self, attempt_id: AttemptId, stream: RunStream) -> prefill_pb2.RunResponse:
        """The attempt's last message: Complete, Failed (settled) or Drained.

        When the stream breaks, this coroutine is cancelled and the attempt is revoked in the background.
        """
        run = asyncio.create_task(self._attempts.run(attempt_id))
        word = asyncio.create_task(_next_message(stream))
        try:
            await asyncio.wait([run, word], return_when=asyncio.FIRST_COMPLETED)
            if not run.done():  # Abort, or the caller closed its side
                await self._attempts.revoke(attempt_id)
                return prefill_pb2.RunResponse(drained=prefill_pb2.Drained())
            return prefill_pb2.RunResponse(complete=complete_to_pb(run.result()))
        except SluiceError as error:
            # Ours, not the caller's: worth a retry.
            if self.draining and isinstance(error, Aborted):
                error = NotReady("this prefill pod is shutting down", stage="run")
            return prefill_pb2.RunResponse(failed=failure_to_pb(error))
        finally:
            for task in (run, word):
                task.cancel()
            await asyncio.gather(run, word, return_exceptions=True)


async def _next_message(stream: RunStream) -> prefill_pb2.RunRequest | None:
    return await anext(stream, None)
