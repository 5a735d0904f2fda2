"""The gRPC face of a decode pod: converts, delegates to ``Peers`` and ``Attempts``, and maps failures."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from grpc import aio

from services.decode.acceptance import AcceptanceWatch
from services.decode.attempts import Attempts
from services.decode.canary import Canary
from services.decode.peers import Peers
from services.decode.readiness import Readiness
from services.tracing import ids_of
from sluice.engine.facade import EngineFacade
from sluice.errors import NotReady, SluiceError
from sluice.layout.negotiate import Agreement
from sluice.rpc.convert import failure_to_pb, mismatch_to_pb
from sluice.rpc.convert_decode import (
    event_to_pb,
    generate_from_pb,
    moved_to_pb,
    pod_layout_to_pb,
)
from sluice.rpc.convert_status import status_to_pb
from sluice.rpc.messages import DecodeStatus, PodLayout, Tokens, pool_statuses
from sluice.telemetry.catalogue import PARTS
from sluice.telemetry.tracing import Tracing
from sluice.v1 import decode_pb2, decode_pb2_grpc, layout_pb2, prefill_pb2

_PAIR_TIMEOUT_S = 15.0

Context = aio.ServicerContext[Any, Any]


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Stateless itself; see the classes it is given."""

    def __init__(
        self,
        pod: PodLayout,
        peers: Peers,
        attempts: Attempts,
        engine: EngineFacade,
        readiness: Readiness,
        canary: Canary,
        acceptance: AcceptanceWatch,
        tracing: Tracing,
        max_model_tokens: int = 0,
        capacity: int = 0,
    ) -> None:
        self._pod = pod
        self._peers = peers
        self._attempts = attempts
        self._engine = engine
        self._readiness = readiness
        self._canary = canary
        self._acceptance = acceptance
        self._tracing = tracing
        self._max_model_tokens = max_model_tokens
        self._capacity = capacity

    async def GetLayout(
        self,
        request: layout_pb2.GetLayoutRequest,
        context: Context,
    ) -> layout_pb2.GetLayoutResponse:
        return pod_layout_to_pb(self._pod)

    async def Pair(
        self,
        request: decode_pb2.PairRequest,
        context: Context,
    ) -> decode_pb2.PairResponse:
        address = request.prefill_address
        outcome = await self._peers.negotiated(address, _PAIR_TIMEOUT_S)
        response = decode_pb2.PairResponse(prefill_epoch=self._peers.epoch_of(address))
        if not isinstance(outcome, Agreement):
            response.mismatches.extend(mismatch_to_pb(m) for m in outcome.mismatches)
            return response
        response.agreed = True
        response.agreement_digest = outcome.digest
        response.mismatches.extend(mismatch_to_pb(note) for note in outcome.notes)
        try:
            result = await self._canary.run(address)
        except SluiceError as error:
            response.failure.CopyFrom(failure_to_pb(error))
            return response
        response.canary_passed = True
        response.canary_s = result.seconds
        response.components.extend(moved_to_pb(moved) for moved in result.components)
        return response

    async def Generate(
        self,
        request: decode_pb2.GenerateRequest,
        context: Context,
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        if self._readiness.draining:
            raise NotReady("this decode pod is shutting down", stage="generate")
        call = generate_from_pb(request)
        with self._tracing.span("decode.generate", **ids_of(call)):
            async with aclosing(self._attempts.generate(call)) as messages:
                async for message in messages:
                    if isinstance(message, Tokens) and message.timings is not None:
                        self._tracing.parts(PARTS, message.timings.parts)
                    yield event_to_pb(message)

    async def GetStatus(
        self,
        request: prefill_pb2.GetStatusRequest,
        context: Context,
    ) -> decode_pb2.GetStatusResponse:
        state = self._readiness.refresh()
        stats = self._engine.latest_stats
        return status_to_pb(
            DecodeStatus(
                epoch=self._pod.epoch,
                ready=state.ready,
                reason=state.reason,
                queued=stats.queued,
                running=stats.running,
                max_model_tokens=self._max_model_tokens,
                peers=self._peers.statuses(),
                pools=pool_statuses(stats.occupancy, self._pod.layout),
                retractions=stats.retractions,
                capacity=self._capacity,
                acceptance=self._acceptance.status(),
            )
        )
