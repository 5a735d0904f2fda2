"""Mutual TLS between real gRPC servers and clients: who gets in, who is told what, and rotation while calls run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import structlog
import trustme
from grpc import aio

from sluice.errors import PeerLost, SluiceError, Untrusted, WrongRole
from sluice.rpc.channel import ChannelConfig
from sluice.rpc.client import DecodeClient, PodClient, PrefillClient
from sluice.rpc.convert_decode import event_to_pb
from sluice.rpc.messages import Finished, GenerateCall, Tokens, Usage
from sluice.rpc.server import RpcServer, ServerConfig
from sluice.rpc.tls import PeerRole, Tls
from sluice.types import AttemptId, FinishReason, RequestId, Sampling
from sluice.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.unit.rpc.certificates import role_files, write_files

_END = Finished(FinishReason.STOP, Usage(3, 0, 2))
_CALL = GenerateCall(RequestId("r"), AttemptId("a"), "p:1", (1, 2, 3), Sampling(), 20.0)
_TIMEOUT_S = 10.0


class _Prefill(prefill_pb2_grpc.PrefillServicer):
    """Notes every handshake that got through."""

    def __init__(self) -> None:
        self.endpoints: list[str] = []

    async def Handshake(
        self, request: prefill_pb2.HandshakeRequest, context: aio.ServicerContext
    ) -> prefill_pb2.HandshakeResponse:
        self.endpoints += [one.agent_name for one in request.endpoints]
        return prefill_pb2.HandshakeResponse(epoch="e")

    async def Ping(
        self, request: prefill_pb2.PingRequest, context: aio.ServicerContext
    ) -> prefill_pb2.PingResponse:
        return prefill_pb2.PingResponse(epoch="e", paired=True)

    async def Run(
        self, request_iterator: AsyncIterator[prefill_pb2.RunRequest], context: aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.RunResponse]:
        async for _ in request_iterator:
            yield prefill_pb2.RunResponse(accepted=prefill_pb2.Accepted())


class _Decode(decode_pb2_grpc.DecodeServicer):
    """One token, then the end when told."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        yield event_to_pb(Tokens((5,)))
        await self.go_on.wait()
        yield event_to_pb(_END)


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


@asynccontextmanager
async def _prefill(folder: Path, ca: trustme.CA) -> AsyncIterator[tuple[str, _Prefill]]:
    servicer = _Prefill()
    tls = Tls(role_files(folder, ca, PeerRole.PREFILL), PeerRole.PREFILL)
    server = RpcServer(
        ServerConfig(drain_s=0.1, tls=tls),
        lambda grpc_: prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, grpc_),
        ("sluice.v1.Prefill",),
    )
    await server.start()
    try:
        yield server.address, servicer
    finally:
        await server.stop()


def _as(folder: Path, ca: trustme.CA, role: PeerRole) -> ChannelConfig:
    return ChannelConfig(tls=Tls(role_files(folder, ca, role), role))


async def _shake(address: str, config: ChannelConfig | None) -> None:
    async with PrefillClient(address, config) as client:
        request = prefill_pb2.HandshakeRequest()
        request.endpoints.add(agent_name="evil")
        await client.handshake(request, _TIMEOUT_S)


@pytest.mark.asyncio
async def test_a_decode_pod_gets_in(tmp_path: Path, ca: trustme.CA) -> None:
    async with _prefill(tmp_path, ca) as (address, servicer):
        await _shake(address, _as(tmp_path, ca, PeerRole.DECODE))
    assert servicer.endpoints == ["evil"]


@pytest.mark.asyncio
@pytest.mark.parametrize("role", [PeerRole.ROUTER, PeerRole.PREFILL, PeerRole.OPERATOR])
async def test_a_handshake_with_the_wrong_role_is_refused_on_both_sides(
    tmp_path: Path, ca: trustme.CA, role: PeerRole
) -> None:
    async with _prefill(tmp_path, ca) as (address, servicer):
        with structlog.testing.capture_logs() as logs:
            with pytest.raises(WrongRole, match=f"is for decode; .* speaks for {role.value}"):
                await _shake(address, _as(tmp_path, ca, role))
            async with PrefillClient(address, _as(tmp_path, ca, role)) as client:
                async with client.run(_TIMEOUT_S) as run:
                    with pytest.raises(WrongRole):
                        async for _ in run:
                            pass
    assert servicer.endpoints == []
    refusals = [log for log in logs if log["event"] == "call_refused"]
    assert [role.dns_name in log["caller"] for log in refusals] == [True, True]


@pytest.mark.asyncio
async def test_a_handshake_without_a_certificate_is_refused(
    tmp_path: Path, ca: trustme.CA, capfd: pytest.CaptureFixture[str]
) -> None:
    """gRPC refuses before any code of ours: it says why in the server's log."""
    async with _prefill(tmp_path, ca) as (address, servicer):
        with pytest.raises(PeerLost, match="may want TLS"):
            await _shake(address, None)
        credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
        name = (("grpc.ssl_target_name_override", "prefill.sluice"),)
        async with aio.secure_channel(address, credentials, options=name) as channel:
            stub = prefill_pb2_grpc.PrefillStub(channel)
            with pytest.raises(aio.AioRpcError) as caught:
                await stub.Handshake(prefill_pb2.HandshakeRequest(), timeout=_TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert servicer.endpoints == []
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in capfd.readouterr().err


@pytest.mark.asyncio
async def test_a_certificate_of_another_ca_is_untrusted(tmp_path: Path, ca: trustme.CA) -> None:
    stranger = trustme.CA()
    files = write_files(tmp_path / "s", stranger, "decode.sluice", trust=[ca, stranger])
    async with _prefill(tmp_path, ca) as (address, servicer):
        with pytest.raises(Untrusted, match="hung up during the handshake"):
            await _shake(address, ChannelConfig(tls=Tls(files, PeerRole.DECODE)))
    assert servicer.endpoints == []


@pytest.mark.asyncio
async def test_a_server_of_another_ca_or_role_is_untrusted(tmp_path: Path, ca: trustme.CA) -> None:
    strangers = _as(tmp_path / "s", trustme.CA(), PeerRole.DECODE)
    async with _prefill(tmp_path, ca) as (address, _):
        with pytest.raises(Untrusted, match="CERTIFICATE_VERIFY_FAILED"):
            await _shake(address, strangers)
        async with DecodeClient(address, _as(tmp_path, ca, PeerRole.ROUTER)) as client:
            with pytest.raises(Untrusted, match="right role"):
                await client.get_status(_TIMEOUT_S)


@pytest.mark.asyncio
async def test_health_needs_a_certificate_but_no_role_and_probes_have_a_plain_port(
    tmp_path: Path, ca: trustme.CA
) -> None:
    tls = Tls(role_files(tmp_path, ca, PeerRole.PREFILL), PeerRole.PREFILL)
    server = RpcServer(
        ServerConfig(drain_s=0.1, tls=tls, health_listen="127.0.0.1:0"),
        lambda grpc_: prefill_pb2_grpc.add_PrefillServicer_to_server(_Prefill(), grpc_),
        ("sluice.v1.Prefill",),
    )
    await server.start()
    try:
        plain = f"127.0.0.1:{server.health_port}"
        operator = _as(tmp_path, ca, PeerRole.OPERATOR)
        async with PrefillClient(server.address, operator) as client, PodClient(plain) as probe:
            for asker in (client, probe):
                assert await asker.healthy("", _TIMEOUT_S)
                assert not await asker.healthy("sluice.v1.Prefill", _TIMEOUT_S)
            await server.set_serving("sluice.v1.Prefill", True)
            for asker in (client, probe):
                assert await asker.healthy("sluice.v1.Prefill", _TIMEOUT_S)
        async with PrefillClient(plain) as client:
            with pytest.raises(SluiceError, match="UNIMPLEMENTED"):
                await client.ping(prefill_pb2.PingRequest(), _TIMEOUT_S)
    finally:
        await server.stop()


@pytest.mark.asyncio
async def test_certificates_and_ca_rotate_without_a_restart_and_without_ending_a_stream(
    tmp_path: Path, ca: trustme.CA
) -> None:
    """Both sides first trust both CAs, then get certificates of the new one, then forget the old."""
    new = trustme.CA()
    servicer = _Decode()
    server_files = role_files(tmp_path, ca, PeerRole.DECODE)
    client_files = role_files(tmp_path, ca, PeerRole.ROUTER)
    server = RpcServer(
        ServerConfig(drain_s=0.1, tls=Tls(server_files, PeerRole.DECODE)),
        lambda grpc_: decode_pb2_grpc.add_DecodeServicer_to_server(servicer, grpc_),
        ("sluice.v1.Decode",),
    )
    await server.start()
    config = ChannelConfig(tls=Tls(client_files, PeerRole.ROUTER))
    old_client = ChannelConfig(
        tls=Tls(write_files(tmp_path / "old", ca, "router.sluice"), PeerRole.ROUTER)
    )
    try:
        async with DecodeClient(server.address, config) as client:
            stream = client.generate(_CALL)
            assert await anext(stream) == Tokens((5,))
            for issuer, trusted in ((ca, (ca, new)), (new, (ca, new)), (new, (new,))):
                for files, name in (
                    (server_files, "decode.sluice"),
                    (client_files, "router.sluice"),
                ):
                    write_files(files.cert.parent, issuer, name, trust=trusted)
                assert await client.healthy("", _TIMEOUT_S)
            async with DecodeClient(server.address, old_client) as late:
                with pytest.raises(Untrusted):
                    await late.healthy("", _TIMEOUT_S)
            servicer.go_on.set()
            assert [event async for event in stream] == [_END]
    finally:
        await server.stop()


@pytest.mark.asyncio
async def test_channels_of_old_certificates_are_closed_when_their_calls_end(
    tmp_path: Path, ca: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[aio.Channel] = []
    concrete = type(aio.insecure_channel("127.0.0.1:1"))
    close = concrete.close

    async def noted(self: aio.Channel, grace: float | None = None) -> None:
        closed.append(self)
        await close(self, grace)

    monkeypatch.setattr(concrete, "close", noted)
    async with _prefill(tmp_path, ca) as (address, _):
        async with PrefillClient(address, _as(tmp_path, ca, PeerRole.DECODE)) as client:
            async with client.run(_TIMEOUT_S) as run:
                await run.send(prefill_pb2.RunRequest())
                answers = aiter(run)
                await anext(answers)
                role_files(tmp_path, ca, PeerRole.DECODE)
                await client.ping(prefill_pb2.PingRequest(), _TIMEOUT_S)
                assert closed == []
                await run.send(prefill_pb2.RunRequest())
                assert (await anext(answers)).WhichOneof("message") == "accepted"
            async with asyncio.timeout(_TIMEOUT_S):
                while len(closed) < 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            role_files(tmp_path, ca, PeerRole.DECODE)
            await client.ping(prefill_pb2.PingRequest(), _TIMEOUT_S)
            async with asyncio.timeout(_TIMEOUT_S):
                while len(closed) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    assert len(set(closed)) == 3


@pytest.mark.asyncio
async def test_a_handshake_that_takes_a_few_hundred_milliseconds_connects(
    tmp_path: Path, ca: trustme.CA
) -> None:
    """A far or busy peer: an attempt to connect was given up after 100 ms, and never succeeded."""

    async with _prefill(tmp_path, ca) as (address, servicer), _slow_road(address) as far:
        await _shake(far, _as(tmp_path, ca, PeerRole.DECODE))
    assert servicer.endpoints == ["evil"]


@asynccontextmanager
async def _slow_road(address: str) -> AsyncIterator[str]:
    """The same server, each first word of whose connections takes 0.3 s longer."""
    host, port = address.split(":")

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(carry(reader, back), carry(there, writer))

    road = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{road.sockets[0].getsockname()[1]}"
    finally:
        road.close()
