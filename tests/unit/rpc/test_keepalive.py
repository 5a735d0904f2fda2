"""A peer that stands still, its port open, is noticed by keepalive."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE
from contextlib import aclosing

import pytest

from sluice.errors import PeerLost
from sluice.rpc.channel import ChannelConfig
from sluice.rpc.client import DecodeClient
from sluice.rpc.messages import GenerateCall, Tokens
from sluice.types import AttemptId, RequestId, Sampling

_POD = """
import asyncio
from sluice.rpc.convert_decode import event_to_pb
from sluice.rpc.messages import Tokens
from sluice.rpc.server import RpcServer, ServerConfig
from sluice.v1 import decode_pb2_grpc

class Decode(decode_pb2_grpc.DecodeServicer):
    async def Generate(self, request, context):
        yield event_to_pb(Tokens((5,)))
        await asyncio.sleep(60)
    async def GetLayout(self, request, context): ...
    GetStatus = Pair = GetLayout

async def main():
    register = lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(Decode(), server)
    server = RpcServer(ServerConfig(), register, ("sluice.v1.Decode",))
    await server.start()
    print(server.address, flush=True)
    await server.wait()

asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_a_stopped_peer_is_lost_within_the_keepalive() -> None:
    pod = await asyncio.create_subprocess_exec(sys.executable, "-c", _POD, stdout=PIPE)
    try:
        assert pod.stdout is not None
        address = (await pod.stdout.readline()).decode().strip()
        config = ChannelConfig(keepalive_s=0.5, keepalive_timeout_s=0.5)
        call = GenerateCall(RequestId("r"), AttemptId("a"), "p:1", (1,), Sampling(), 60.0)
        async with (
            DecodeClient(address, config) as client,
            aclosing(client.generate(call)) as events,
        ):
            assert await anext(events) == Tokens((5,))
            pod.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(PeerLost):
                await anext(events)
            assert time.monotonic() - started < 4.0
    finally:
        pod.kill()
        await pod.communicate()
