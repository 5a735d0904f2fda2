"""A router on a free port in front of scripted decode pods that speak real gRPC."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from grpc import aio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from services.router.app import create_app
from services.router.settings import RouterSettings, make_pairing
from sluice.rpc.convert_decode import event_to_pb, generate_from_pb
from sluice.rpc.convert_status import status_to_pb
from sluice.rpc.messages import (
    DecodeStatus,
    Event,
    Finished,
    GenerateCall,
    PeerStatus,
    Tokens,
    Usage,
)
from sluice.rpc.server import RpcServer, ServerConfig
from sluice.text.chat import ChatTemplate
from sluice.text.tokenizer import ModelTokenizer
from sluice.transfer.messages import Moved, Timings
from sluice.types import Epoch, FinishReason
from sluice.v1 import decode_pb2, decode_pb2_grpc

EOS = 1
PREFILL = "prefill.test:1"
MODEL = "tiny-test"

Script = Callable[[GenerateCall], AsyncIterator[Event]]


def byte_tokenizer() -> ModelTokenizer:
    """One token a byte (ids 2..257), bos 0, eos 1: every text splits where a test wants it to."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=258,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    return ModelTokenizer(tokenizer, (EOS,), 0)


TOKENIZER = byte_tokenizer()
TEMPLATE = ChatTemplate(
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    {"bos_token": "<s>", "eos_token": "</s>"},
)
USAGE = Usage(
    prompt_tokens=5,
    cached_tokens=2,
    completion_tokens=4,
    verify_steps=2,
    accepted_drafts=1,
    timings=Timings(0.1, 0.2, 0.3),
    components=(Moved("target.swa", 5, 500), Moved("draft.swa", 5, 50)),
)


def ids(text: str) -> tuple[int, ...]:
    """Token ids of ``text`` without bos."""
    return TOKENIZER.encode(text)[1:]


def steps(*texts: str) -> list[Tokens]:
    """One event a text: the first from prefill, the rest from verify steps."""
    return [
        Tokens(ids(text), None if rank == 0 else max(len(ids(text)) - 1, 0))
        for rank, text in enumerate(texts)
    ]


def says(*texts: str, reason: FinishReason = FinishReason.LENGTH, usage: Usage = USAGE) -> Script:
    """A script that streams ``texts`` and finishes."""

    async def script(_: GenerateCall) -> AsyncIterator[Event]:
        for event in steps(*texts):
            yield event
        yield Finished(reason, usage)

    return script


def fails(error: Exception, *texts: str) -> Script:
    """A script that streams ``texts`` and then raises."""

    async def script(_: GenerateCall) -> AsyncIterator[Event]:
        for event in steps(*texts):
            yield event
        raise error

    return script


def hangs(*texts: str) -> Script:
    """A script that streams ``texts`` and then nothing for ever."""

    async def script(_: GenerateCall) -> AsyncIterator[Event]:
        for event in steps(*texts):
            yield event
        await asyncio.sleep(60)

    return script


READY = DecodeStatus(
    epoch=Epoch("e1"),
    ready=True,
    reason="",
    queued=0,
    running=0,
    max_model_tokens=200,
    peers=(PeerStatus(PREFILL, "p1", "agreed"),),
)


class ScriptedDecode(decode_pb2_grpc.DecodeServicer):
    """Answers each `Generate` with the next script; the last one serves all later calls."""

    def __init__(self, scripts: Sequence[Script], status: DecodeStatus = READY) -> None:
        self.scripts = list(scripts)
        self.status = status
        self.calls: list[GenerateCall] = []
        self.open = 0
        self.closed = asyncio.Event()

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        call = generate_from_pb(request)
        script = self.scripts[min(len(self.calls), len(self.scripts) - 1)]
        self.calls.append(call)
        self.open += 1
        try:
            async for event in script(call):
                yield event_to_pb(event)
        finally:
            self.open -= 1
            self.closed.set()

    async def GetStatus(
        self, request: decode_pb2.GetStatusRequest, context: aio.ServicerContext
    ) -> decode_pb2.GetStatusResponse:
        return status_to_pb(self.status)

    async def GetLayout(self, request: object, context: object) -> None:  # type: ignore[override]
        raise NotImplementedError

    Pair = GetLayout  # type: ignore[assignment]


@dataclass
class Stack:
    """What a test talks to."""

    url: str
    http: httpx.AsyncClient
    decodes: list[ScriptedDecode]
    addresses: list[str] = field(default_factory=list)

    @property
    def decode(self) -> ScriptedDecode:
        return self.decodes[0]

    def attempts(self) -> list[str]:
        return [call.attempt_id for decode in self.decodes for call in decode.calls]

    async def post(self, **body: object) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": MODEL, **body})

    async def chat(self, *messages: tuple[str, object], **body: object) -> httpx.Response:
        """``messages`` are (role, content)."""
        turns = [{"role": role, "content": content} for role, content in messages]
        chosen = {"model": MODEL, "messages": turns, **body}
        return await self.http.post("/v1/chat/completions", json=chosen)


class _Server(uvicorn.Server):
    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        return nullcontext()  # pytest keeps its own


@asynccontextmanager
async def router_over(
    *decodes: ScriptedDecode,
    tokenizer: ModelTokenizer | None = None,
    template: ChatTemplate | None = None,
    **settings: object,
) -> AsyncIterator[Stack]:
    """Real decode servers, a real router, a client; all on free ports, all gone afterwards."""
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(decode_server(d)) for d in decodes]
        chosen = RouterSettings.model_validate(
            {
                "model_dir": Path("unused"),
                "model_name": MODEL,
                "decodes": tuple(addresses),
                "prefills": (),
                "pair_wait_s": 0.2,
                **settings,
            }
        )
        app = create_app(chosen, tokenizer or TOKENIZER, make_pairing(chosen), template)
        url = await stack.enter_async_context(_http_server(app))
        client = httpx.AsyncClient(base_url=url, timeout=20.0, trust_env=False)
        await stack.enter_async_context(client)
        yield Stack(url, client, list(decodes), addresses)


@asynccontextmanager
async def decode_server(servicer: ScriptedDecode) -> AsyncIterator[str]:
    server = RpcServer(
        ServerConfig(drain_s=0.1),
        lambda grpc_: decode_pb2_grpc.add_DecodeServicer_to_server(servicer, grpc_),
        ("sluice.v1.Decode",),
    )
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()


@asynccontextmanager
async def _http_server(app: FastAPI) -> AsyncIterator[str]:
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1)
    server = _Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


def sse_events(response: httpx.Response) -> list[Any]:
    """Parsed SSE data; "[DONE]" stays a string."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    datas = [line.removeprefix("data: ") for line in lines]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def sse_text(events: list[Any], index: int = 0) -> str:
    """Text of one choice of a streamed completion or chat."""
    choices = [choice for event in events for choice in event["choices"]]
    mine = [choice for choice in choices if choice["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in mine)


def peer(address: str = PREFILL, state: str = "agreed", reason: str = "") -> DecodeStatus:
    """`READY`, but with this peer."""
    return replace(READY, peers=(PeerStatus(address, "p1", state, reason),))


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for something that nobody announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
