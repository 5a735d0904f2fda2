"""Stub workers for `bench.router`: they answer at once, so that what is measured is what stands before them.

``python -m bench.router_stubs grpc|http PORT CHUNKS``. The gRPC one is a decode pod as Sluice's router sees it; the
HTTP one is an OpenAI-compatible worker as gateways see them, for either role. Each answer is ``CHUNKS`` events.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

from aiohttp import web

from sluice.rpc.convert_decode import event_to_pb
from sluice.rpc.convert_status import status_to_pb
from sluice.rpc.messages import DecodeStatus, Finished, PeerStatus, Tokens, Usage
from sluice.rpc.server import RpcServer, ServerConfig
from sluice.types import Epoch, FinishReason
from sluice.v1 import decode_pb2, decode_pb2_grpc

TOKEN = 300  # any token whose text is text
STATUS = DecodeStatus(
    epoch=Epoch("stub"),
    ready=True,
    reason="",
    queued=0,
    running=0,
    max_model_tokens=0,
    peers=(PeerStatus("stub:1", "stub", "agreed"),),
)


class StubDecode(decode_pb2_grpc.DecodeServicer):
    def __init__(self, chunks: int) -> None:
        self._tokens = event_to_pb(Tokens((TOKEN,), None))
        self._end = event_to_pb(Finished(FinishReason.LENGTH, Usage(8, 0, chunks)))
        self._chunks = chunks

    async def Generate(  # type: ignore[override]
        self, request: decode_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        for _ in range(self._chunks):
            yield self._tokens
        yield self._end

    async def GetStatus(self, request: object, context: object) -> decode_pb2.GetStatusResponse:  # type: ignore[override]
        return status_to_pb(STATUS)


async def serve_grpc(port: int, chunks: int) -> None:
    servicer = StubDecode(chunks)
    server = RpcServer(
        ServerConfig(f"127.0.0.1:{port}"),
        lambda grpc: decode_pb2_grpc.add_DecodeServicer_to_server(servicer, grpc),
        ("sluice.v1.Decode",),
    )
    await server.start()
    await asyncio.Event().wait()


async def serve_http(port: int, chunks: int) -> None:
    choice = {"index": 0, "text": " word", "finish_reason": None, "logprobs": None}
    body = {"id": "c", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}
    event = f"data: {json.dumps(body)}\n\n".encode()

    async def complete(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(chunks):
            await response.write(event)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def facts(_: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", "served_model_name": "m", "status": "ok"})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/{path:.*}", facts)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    kind, at, count = sys.argv[1:]
    asyncio.run((serve_grpc if kind == "grpc" else serve_http)(int(at), int(count)))
