"""Typed clients of the two pods. Every call has a deadline; every failure is a `SluiceError`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2

from sluice.errors import PeerLost
from sluice.rpc.channel import ChannelConfig, PodChannel
from sluice.rpc.convert_decode import (
    event_from_pb,
    generate_to_pb,
    pair_report_from_pb,
    pod_layout_from_pb,
)
from sluice.rpc.convert_status import prefill_status_from_pb, status_from_pb
from sluice.rpc.messages import (
    DecodeStatus,
    Event,
    Finished,
    GenerateCall,
    PairReport,
    PodLayout,
    PrefillStatus,
)
from sluice.rpc.status import error_of
from sluice.rpc.tls import PeerRole
from sluice.telemetry.traceparent import outgoing
from sluice.v1 import decode_pb2, decode_pb2_grpc, layout_pb2, prefill_pb2, prefill_pb2_grpc

# The pod answers a passed deadline itself, typed; the transport's own deadline is the safety net.
_DEADLINE_GRACE_S = 0.5
T = TypeVar("T")
RunStream = aio.StreamStreamCall[prefill_pb2.RunRequest, prefill_pb2.RunResponse]


class PodClient:
    """One address. Connects on the first call; close it when its calls are over."""

    server: ClassVar[PeerRole | None] = None  # the role its certificate must have, with TLS

    def __init__(self, address: str, config: ChannelConfig | None = None) -> None:
        self.address = address
        config = config or ChannelConfig()
        self._tls = config.tls is not None
        self._channel = PodChannel(address, config, self.server)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def healthy(self, service: str = "", timeout_s: float = 1.0) -> bool:
        """`grpc.health.v1`: is ``service`` serving? False also for a name the pod doesn't know."""
        check = self._channel.get().unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            call = check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
            self._channel.keep(call)
            answer = await call
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return False
            raise error_of(error, self.address, self._tls) from error
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _answer(self, call: aio.UnaryUnaryCall[Any, T]) -> T:
        self._channel.keep(call)
        try:
            return await call
        except grpc.RpcError as error:
            raise error_of(error, self.address, self._tls) from error


class PrefillClient(PodClient):
    """What a decode pod asks of a prefill pod; speaks protobuf, as its caller is a servicer."""

    server = PeerRole.PREFILL

    @property
    def _stub(self) -> prefill_pb2_grpc.PrefillAsyncStub:
        return prefill_pb2_grpc.PrefillStub(self._channel.get())

    async def get_layout(self, timeout_s: float) -> PodLayout:
        request = layout_pb2.GetLayoutRequest()
        response = await self._answer(self._stub.GetLayout(request, timeout=timeout_s))
        return pod_layout_from_pb(response)

    async def handshake(
        self, request: prefill_pb2.HandshakeRequest, timeout_s: float
    ) -> prefill_pb2.HandshakeResponse:
        return await self._answer(self._stub.Handshake(request, timeout=timeout_s))

    async def drain(
        self, request: prefill_pb2.DrainRequest, timeout_s: float
    ) -> prefill_pb2.DrainResponse:
        return await self._answer(self._stub.Drain(request, timeout=timeout_s))

    async def ping(
        self, request: prefill_pb2.PingRequest, timeout_s: float
    ) -> prefill_pb2.PingResponse:
        return await self._answer(self._stub.Ping(request, timeout=timeout_s))

    async def get_status(self, timeout_s: float) -> PrefillStatus:
        request = prefill_pb2.GetStatusRequest()
        return prefill_status_from_pb(
            await self._answer(self._stub.GetStatus(request, timeout=timeout_s))
        )

    def run(self, timeout_s: float) -> RunCall:
        """Open the stream of one attempt; use it as a context manager."""
        stream = self._stub.Run(timeout=timeout_s + _DEADLINE_GRACE_S, metadata=outgoing())
        self._channel.keep(stream)
        return RunCall(stream, self.address, self._tls)


class RunCall:
    """One `Prefill.Run` stream. Leaving the ``async with`` cancels it unless it has ended."""

    def __init__(self, stream: RunStream, address: str, tls: bool = False) -> None:
        self._stream = stream
        self._address = address
        self._tls = tls

    async def send(self, request: prefill_pb2.RunRequest) -> None:
        """Raises the stream's error when it has ended, `PeerLost` when it ended without one."""
        try:
            await self._stream.write(request)
        except grpc.RpcError as error:
            raise error_of(error, self._address, self._tls) from error
        except asyncio.InvalidStateError as error:
            raise PeerLost(f"the stream to {self._address} is over", stage="run") from error

    async def done_sending(self) -> None:
        try:
            await self._stream.done_writing()
        except grpc.RpcError as error:
            raise error_of(error, self._address, self._tls) from error

    async def __aiter__(self) -> AsyncIterator[prefill_pb2.RunResponse]:
        try:
            async for response in self._stream:
                yield response
        except grpc.RpcError as error:
            raise error_of(error, self._address, self._tls) from error

    def cancel(self) -> None:
        self._stream.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stream.cancel()


class DecodeClient(PodClient):
    """What the router and an operator ask of a decode pod; plain data in and out."""

    server = PeerRole.DECODE

    @property
    def _stub(self) -> decode_pb2_grpc.DecodeAsyncStub:
        return decode_pb2_grpc.DecodeStub(self._channel.get())

    async def get_layout(self, timeout_s: float) -> PodLayout:
        request = layout_pb2.GetLayoutRequest()
        response = await self._answer(self._stub.GetLayout(request, timeout=timeout_s))
        return pod_layout_from_pb(response)

    async def get_status(self, timeout_s: float) -> DecodeStatus:
        request = prefill_pb2.GetStatusRequest()
        response = await self._answer(self._stub.GetStatus(request, timeout=timeout_s))
        return status_from_pb(response)

    async def pair(self, prefill_address: str, timeout_s: float) -> PairReport:
        """Handshake plus canary with a named prefill, as the decode pod saw it."""
        request = decode_pb2.PairRequest(prefill_address=prefill_address)
        return pair_report_from_pb(await self._answer(self._stub.Pair(request, timeout=timeout_s)))

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Event]:
        """Events of one attempt, `Finished` last. Closing the generator cancels the call at once.

        Raises what the pod raised; `PeerLost` when the stream breaks or ends early.
        """
        timeout_s = call.timeout_s + _DEADLINE_GRACE_S
        stream = self._stub.Generate(generate_to_pb(call), timeout=timeout_s, metadata=outgoing())
        self._channel.keep(stream)
        try:
            async for response in stream:
                event = event_from_pb(response)
                yield event
                if isinstance(event, Finished):
                    return
        except grpc.RpcError as error:
            raise error_of(error, self.address, self._tls) from error
        finally:
            stream.cancel()
        raise PeerLost(f"{self.address} ended the stream without finishing", stage="decode")
