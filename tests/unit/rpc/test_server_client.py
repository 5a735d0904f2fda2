"""Server base and clients against each other over real sockets: errors, cancel, health, drain."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import grpc
import pytest
import structlog
from grpc import aio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from sluice.errors import ConfigError, DeadlineExceeded, InternalError, Overloaded, PeerLost
from sluice.rpc.client import DecodeClient, PrefillClient
from sluice.rpc.convert_decode import event_to_pb
from sluice.rpc.messages import Finished, GenerateCall, Tokens, Usage
from sluice.rpc.server import RpcServer, ServerConfig
from sluice.types import AttemptId, FinishReason, RequestId, Sampling
from sluice.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

_SERVICE = "sluice.v1.Decode"
_END = Finished(FinishReason.STOP, Usage(3, 0, 2))
_CALL = GenerateCall(RequestId("r"), AttemptId("a"), "p:1", (1, 2, 3), Sampling(), 5.0)
Script = Callable[[], AsyncIterator[decode_pb2.GenerateResponse]]


class _Decode(decode_pb2_grpc.DecodeServicer):
    """``Generate`` does what the test says and tells when it was closed."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.closed = asyncio.Event()

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        try:
            async for response in self._script():
                yield response
        finally:
            self.closed.set()

    async def GetStatus(
        self, request: decode_pb2.GetStatusRequest, context: aio.ServicerContext
    ) -> decode_pb2.GetStatusResponse:
        raise KeyError("a bug")

    async def GetLayout(self, request: object, context: object) -> None:  # type: ignore[override]
        await asyncio.sleep(30)

    async def Pair(self, request: object, context: object) -> None:  # type: ignore[override]
        raise Overloaded("no room", stage="pair", remedy="wait")


async def _no_tokens() -> AsyncIterator[decode_pb2.GenerateResponse]:
    yield event_to_pb(_END)


@asynccontextmanager
async def _serve(
    script: Script = _no_tokens, drain_s: float = 0.2
) -> AsyncIterator[tuple[RpcServer, _Decode]]:
    servicer = _Decode(script)
    server = RpcServer(
        ServerConfig(drain_s=drain_s),
        lambda grpc_: decode_pb2_grpc.add_DecodeServicer_to_server(servicer, grpc_),
        (_SERVICE,),
        ("sluice.layout",),
    )
    await server.start()
    try:
        yield server, servicer
    finally:
        await server.stop()


async def _collect(client: DecodeClient) -> list[Tokens | Finished]:
    return [event async for event in client.generate(_CALL)]


@pytest.mark.asyncio
async def test_events_arrive_in_order() -> None:
    async def script() -> AsyncIterator[decode_pb2.GenerateResponse]:
        yield event_to_pb(Tokens((5,)))
        yield event_to_pb(Tokens((6, 7), 1))
        yield event_to_pb(Tokens((8,), 0))
        yield event_to_pb(_END)

    async with _serve(script) as (server, _), DecodeClient(server.address) as client:
        events = await _collect(client)
    assert events == [Tokens((5,)), Tokens((6, 7), 1), Tokens((8,), 0), _END]


@pytest.mark.asyncio
async def test_a_typed_error_keeps_its_class_in_the_middle_of_a_stream() -> None:
    async def script() -> AsyncIterator[decode_pb2.GenerateResponse]:
        yield event_to_pb(Tokens((5,)))
        raise Overloaded("pools are full", stage="decode")

    async with _serve(script) as (server, _), DecodeClient(server.address) as client:
        async with aclosing(client.generate(_CALL)) as events:
            assert await anext(events) == Tokens((5,))
            with pytest.raises(Overloaded, match="pools are full") as caught:
                await anext(events)
    assert caught.value.stage == "decode"


@pytest.mark.asyncio
async def test_a_servicers_bug_is_internal_and_names_the_class() -> None:
    async with _serve() as (server, _), DecodeClient(server.address) as client:
        with pytest.raises(InternalError, match="KeyError"):
            await client.get_status(5.0)


@pytest.mark.asyncio
async def test_a_unary_error_keeps_class_stage_and_remedy() -> None:
    async with _serve() as (server, _), DecodeClient(server.address) as client:
        with pytest.raises(Overloaded, match="no room") as caught:
            await client.pair("p:1", 5.0)
    assert (caught.value.stage, caught.value.remedy) == ("pair", "wait")


@pytest.mark.asyncio
async def test_every_call_has_a_deadline() -> None:
    async with _serve() as (server, _), DecodeClient(server.address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.get_layout(0.1)


@pytest.mark.asyncio
async def test_a_stream_that_ends_early_is_a_lost_peer() -> None:
    async def script() -> AsyncIterator[decode_pb2.GenerateResponse]:
        yield event_to_pb(Tokens((5,)))

    async with _serve(script) as (server, _), DecodeClient(server.address) as client:
        with pytest.raises(PeerLost, match="without finishing"):
            await _collect(client)


@pytest.mark.asyncio
async def test_leaving_the_stream_closes_the_servicer_at_once() -> None:
    async def script() -> AsyncIterator[decode_pb2.GenerateResponse]:
        yield event_to_pb(Tokens((5,)))
        await asyncio.sleep(30)

    async with _serve(script) as (server, servicer), DecodeClient(server.address) as client:
        async with aclosing(client.generate(_CALL)) as events:
            assert await anext(events) == Tokens((5,))
        await asyncio.wait_for(servicer.closed.wait(), 1.0)


@pytest.mark.asyncio
async def test_cancelling_the_reader_closes_the_servicer_at_once() -> None:
    async def script() -> AsyncIterator[decode_pb2.GenerateResponse]:
        yield event_to_pb(Tokens((5,)))
        await asyncio.sleep(30)

    async with _serve(script) as (server, servicer), DecodeClient(server.address) as client:
        reader = asyncio.create_task(_collect(client))
        await asyncio.sleep(0.2)
        reader.cancel()
        await asyncio.wait_for(servicer.closed.wait(), 1.0)
        assert (await asyncio.gather(reader, return_exceptions=True))[0].__class__ is (
            asyncio.CancelledError
        )


@pytest.mark.asyncio
async def test_a_servicer_blocked_in_a_write_is_closed_at_once() -> None:
    """Cancelled while its generator waits at a yield: closing must not be left to the collector."""
    kept: list[object] = []
    hooks = sys.get_asyncgen_hooks()

    def keep(generator: AsyncGenerator[object]) -> None:
        kept.append(generator)  # as a traceback or a cycle would
        if hooks.firstiter is not None:
            hooks.firstiter(generator)

    async def script() -> AsyncIterator[decode_pb2.GenerateResponse]:
        while True:
            yield event_to_pb(Tokens(tuple(range(100_000))))

    sys.set_asyncgen_hooks(firstiter=keep, finalizer=hooks.finalizer)
    try:
        with structlog.testing.capture_logs() as logs:
            async with _serve(script) as (server, servicer):
                async with DecodeClient(server.address) as client:
                    async with aclosing(client.generate(_CALL)) as events:
                        await anext(events)
                        await asyncio.sleep(0.3)
                    await asyncio.wait_for(servicer.closed.wait(), 2.0)
        assert logs == []  # a client that left is no error
    finally:
        sys.set_asyncgen_hooks(*hooks)


@pytest.mark.asyncio
async def test_nobody_there_is_a_lost_peer_and_quick() -> None:
    async with _serve() as (server, _):
        address = server.address
    started = time.monotonic()
    async with DecodeClient(address) as client:
        with pytest.raises(PeerLost):
            await client.get_status(5.0)
    assert time.monotonic() - started < 2.0


@pytest.mark.asyncio
async def test_a_client_finds_a_server_restarted_on_its_port() -> None:
    async with _serve() as (server, _):
        address = server.address
        client = DecodeClient(address)
        assert await client.healthy()
    with pytest.raises(PeerLost):
        await client.healthy()
    servicer = _Decode(_no_tokens)
    again = RpcServer(
        ServerConfig(listen=address, drain_s=0.1),
        lambda grpc_: decode_pb2_grpc.add_DecodeServicer_to_server(servicer, grpc_),
        (_SERVICE,),
    )
    await again.start()
    try:
        async with asyncio.timeout(3.0):
            while True:
                try:
                    assert await client.healthy()
                    break
                except PeerLost:
                    await asyncio.sleep(0.05)
    finally:
        await client.close()
        await again.stop()


@pytest.mark.asyncio
async def test_a_taken_port_is_refused_by_name() -> None:
    async with _serve() as (server, _):
        second = RpcServer(ServerConfig(listen=server.address), lambda _: None, (_SERVICE,))
        with pytest.raises(ConfigError, match="can't listen on"):
            await second.start()


@pytest.mark.asyncio
async def test_health_follows_what_the_pod_says() -> None:
    async with _serve() as (server, _), DecodeClient(server.address) as client:
        assert await client.healthy("")
        assert not await client.healthy(_SERVICE)
        assert not await client.healthy("sluice.layout")
        assert not await client.healthy("no.such.service")
        await server.set_serving(_SERVICE, True)
        assert await client.healthy(_SERVICE)
        assert not await client.healthy("sluice.layout")


@pytest.mark.asyncio
async def test_stop_is_bounded_by_drain() -> None:
    async def script() -> AsyncIterator[decode_pb2.GenerateResponse]:
        yield event_to_pb(Tokens((5,)))
        await asyncio.sleep(30)

    async with _serve(script, drain_s=0.3) as (server, servicer):
        async with (
            DecodeClient(server.address) as client,
            aclosing(client.generate(_CALL)) as events,
        ):
            await anext(events)
            started = time.monotonic()
            await server.stop()
            assert 0.2 < time.monotonic() - started < 2.0
            with pytest.raises(PeerLost):
                await anext(events)
        assert servicer.closed.is_set()


@pytest.mark.asyncio
async def test_stop_lets_a_running_call_finish() -> None:
    async def script() -> AsyncIterator[decode_pb2.GenerateResponse]:
        yield event_to_pb(Tokens((5,)))
        await asyncio.sleep(0.2)
        yield event_to_pb(_END)

    async with _serve(script, drain_s=5.0) as (server, _), DecodeClient(server.address) as client:
        async with aclosing(client.generate(_CALL)) as events:
            await anext(events)
            stopping = asyncio.create_task(server.stop())
            assert await anext(events) == _END
        await stopping


@pytest.mark.asyncio
async def test_reflection_lists_the_services() -> None:
    async with _serve() as (server, _), aio.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]), timeout=5.0)
        answers = [answer async for answer in call]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {_SERVICE, "grpc.health.v1.Health"} <= names


class _Prefill(prefill_pb2_grpc.PrefillServicer):
    """``Run`` echoes: Accepted for a Start, then Drained for an Abort."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def Run(
        self, request_iterator: AsyncIterator[prefill_pb2.RunRequest], context: aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.RunResponse]:
        try:
            async for request in request_iterator:
                if request.WhichOneof("message") == "start":
                    yield prefill_pb2.RunResponse(accepted=prefill_pb2.Accepted())
                else:
                    yield prefill_pb2.RunResponse(drained=prefill_pb2.Drained())
                    return
        finally:
            self.closed.set()

    async def GetLayout(self, request: object, context: object) -> None:  # type: ignore[override]
        raise AssertionError

    Handshake = Drain = Ping = GetLayout  # type: ignore[assignment]


@asynccontextmanager
async def _serve_prefill() -> AsyncIterator[tuple[RpcServer, _Prefill]]:
    servicer = _Prefill()
    server = RpcServer(
        ServerConfig(drain_s=0.2),
        lambda grpc_: prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, grpc_),
        ("sluice.v1.Prefill",),
    )
    await server.start()
    try:
        yield server, servicer
    finally:
        await server.stop()


_START = prefill_pb2.RunRequest(start=prefill_pb2.Start(attempt_id="a"))
_ABORT = prefill_pb2.RunRequest(abort=prefill_pb2.Abort(reason="test"))


@pytest.mark.asyncio
async def test_run_talks_both_ways() -> None:
    async with _serve_prefill() as (server, _), PrefillClient(server.address) as client:
        async with client.run(5.0) as run:
            await run.send(_START)
            answers = aiter(run)
            assert (await anext(answers)).WhichOneof("message") == "accepted"
            await run.send(_ABORT)
            assert (await anext(answers)).WhichOneof("message") == "drained"
            with pytest.raises(StopAsyncIteration):
                await anext(answers)
            with pytest.raises(PeerLost):
                await run.send(_ABORT)


@pytest.mark.asyncio
async def test_leaving_run_closes_the_servicer_at_once() -> None:
    async with _serve_prefill() as (server, servicer), PrefillClient(server.address) as client:
        async with client.run(30.0) as run:
            await run.send(_START)
            await anext(aiter(run))
        await asyncio.wait_for(servicer.closed.wait(), 1.0)


def test_grpc_status_names_exist() -> None:
    from sluice import errors

    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    assert all(k.grpc_status in grpc.StatusCode.__members__ for k in kinds)
