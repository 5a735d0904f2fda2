"""Any body: what one aggregated engine answers or refuses, real pods answer or refuse alike, token by token."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import event as note
from hypothesis import strategies as st

from services.router.app import create_app
from services.router.settings import RouterSettings, make_pairing
from sluice.config import EngineConfig, PoolConfig, PoolMode
from sluice.engine.build import build_engine
from sluice.engine.facade import EngineFacade
from sluice.rpc.messages import Event, Finished, GenerateCall, PromptScored, Tokens, Usage
from sluice.text.chat import ChatTemplate
from sluice.text.tokenizer import ModelTokenizer
from sluice.types import Request, Role
from tests.e2e.pods import Pair, eventually
from tests.unit.router.one_pair import OnePair

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(600)]
_LIMIT = 300  # tokens of prompt and answer
_TEMPLATE = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>", {}
)
_STABLE_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


class AggregatedDecode:
    """The engine that does both roles, behind the call that a decode pod answers."""

    def __init__(self, engine: EngineFacade) -> None:
        self._engine = engine

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Event]:
        count = 0
        async for event in self._engine.generate(
            Request(call.request_id, call.prompt, call.sampling)
        ):
            if event.prompt_logprobs is not None:
                yield PromptScored(event.prompt_logprobs)
            if event.token_ids:
                yield Tokens(event.token_ids, event.accepted_drafts, event.logprobs)
            count += len(event.token_ids)
            if event.finish_reason is not None:
                yield Finished(event.finish_reason, Usage(len(call.prompt), 0, count))


@dataclass
class Both:
    """The same router in front of both, on one loop that stays."""

    runner: asyncio.Runner
    aggregated: FastAPI
    disaggregated: FastAPI

    def post(self, path: str, body: dict[str, Any]) -> tuple[httpx.Response, httpx.Response]:
        async def both() -> tuple[httpx.Response, httpx.Response]:
            return await _post(self.aggregated, path, body), await _post(
                self.disaggregated, path, body
            )

        return self.runner.run(both())


async def _post(app: FastAPI, path: str, body: dict[str, Any]) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        return await client.post(path, json=body, timeout=60.0)


@pytest.fixture(scope="module")
def both(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    pair = Pair.create(
        tmp_path_factory.mktemp("pods"), model_dir, decode_max_model_tokens=str(_LIMIT)
    )
    core = build_engine(
        model_dir,
        Role.AGGREGATED,
        PoolConfig(mode=PoolMode.PAGED),
        None,
        EngineConfig(max_batch_tokens=512),
        dtype="float32",
    )
    tokenizer = ModelTokenizer.load(model_dir)
    chosen = RouterSettings.model_validate(
        {"model_dir": model_dir, "model_name": "m", "decodes": (pair.decode.address,)}
    )
    pairing = make_pairing(chosen)
    engine = EngineFacade(core)
    one = OnePair(AggregatedDecode(engine), _LIMIT)
    apps = (create_app(chosen, tokenizer, source, _TEMPLATE) for source in (one, pairing))

    async def start() -> None:
        await pair.ready()
        await engine.start()
        await pairing.start()

        async def paired() -> bool:
            return bool(pairing.readiness().pairs)

        await eventually(paired, 30.0, "the router sees the pair")

    async def stop() -> None:
        await pairing.stop()
        await engine.stop()

    with asyncio.Runner() as runner:
        pair.start()
        try:
            runner.run(start())
            yield Both(runner, *apps)
            runner.run(stop())
            runner.run(pair.baseline())
        finally:
            pair.kill()


def _some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A body with some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


_WORDS = st.lists(
    st.sampled_from(["the ", "a ", "def f(", "\n", "0", "é", "sum ", "}", "<|eos|>"]), max_size=14
).map("".join)
_PROMPTS = st.one_of(
    _WORDS,
    *[st.lists(st.integers(0, 511), min_size=1, max_size=40)] * 6,
    st.lists(_WORDS, min_size=1, max_size=2),
    st.just([7] * _LIMIT),
    st.just([600]),
)
_SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
_FIELDS = {
    "max_tokens": st.integers(0, 12),
    "temperature": st.sampled_from([0, 0.7, 1.5]),
    "top_p": st.sampled_from([0, 0.5, 1]),
    "top_k": st.sampled_from([-1, 0, 5]),
    "min_p": st.sampled_from([0, 0.2]),
    "presence_penalty": st.sampled_from([0.5, -2, 0.1, 2, -1, 2.5]),
    "frequency_penalty": st.sampled_from([1, 2]),
    "repetition_penalty": st.sampled_from([0.8, 1.3]),
    "logit_bias": st.dictionaries(
        st.sampled_from(["3", "40", "61", "90", "511", "512"]), st.integers(-100, 100), max_size=2
    ),
    "n": st.integers(1, 2),
    "stop": st.lists(st.sampled_from([" ", "e", "th"]), max_size=2),
    "min_tokens": st.integers(0, 3),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.lists(st.integers(3, 512), max_size=4),
    "include_stop_str_in_output": st.booleans(),
    "stream": st.booleans(),
    "structured_outputs": st.sampled_from(
        [{"regex": "[a-c]{2,5}"}, {"choice": ["yes", "no"]}, {"json": _SCHEMA}, {"regex": "("}]
    ),
}
_COMPLETION = _some(
    **_FIELDS,
    echo=st.booleans(),
    logprobs=st.integers(0, 3),
    prompt_logprobs=st.integers(0, 2),
)
_CHAT = _some(
    **_FIELDS,
    logprobs=st.booleans(),
    top_logprobs=st.integers(0, 3),
    prompt_logprobs=st.integers(0, 2),
    max_completion_tokens=st.integers(1, 8),
)
_FEW = settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@_FEW
@given(body=_COMPLETION, prompt=_PROMPTS, seed=st.integers(0, 9))
def test_completions(both: Both, body: dict[str, Any], prompt: Any, seed: int) -> None:
    full = {**body, "prompt": prompt, "seed": seed, "return_token_ids": True}
    _check(*both.post("/v1/completions", full))


@_FEW
@given(body=_CHAT, text=_WORDS, seed=st.integers(0, 9))
def test_chats(both: Both, body: dict[str, Any], text: str, seed: int) -> None:
    full = {**body, "seed": seed, "return_token_ids": True}
    if "max_tokens" not in full:
        full.setdefault("max_completion_tokens", 8)
    messages = [{"role": "user", "content": text}]
    _check(*both.post("/v1/chat/completions", {**full, "messages": messages}))


def _check(aggregated: httpx.Response, disaggregated: httpx.Response) -> None:
    assert disaggregated.status_code == aggregated.status_code, (
        aggregated.text,
        disaggregated.text,
    )
    assert aggregated.status_code in (200, 400), aggregated.text
    note(f"status {aggregated.status_code}")
    theirs, ours = (_content(response) for response in (aggregated, disaggregated))
    assert _alike(ours, theirs), f"{ours}\n{theirs}"


def _content(response: httpx.Response) -> Any:
    """The answer without what may differ: ids, times, how steps fell into chunks."""
    if response.status_code != 200:
        return response.json()["error"]
    if not response.headers["content-type"].startswith("text/event-stream"):
        whole = response.json()
        choices = [_settled(choice) for choice in whole["choices"]]
        usage = {name: whole["usage"][name] for name in _STABLE_USAGE}
        return choices, usage, whole.get("prompt_logprobs")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    streamed: dict[int, list[Any]] = {}
    for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
        streamed.setdefault(choice["index"], []).append(_settled(choice))
    return sorted(streamed.items())


def _settled(choice: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in choice.items() if name != "accepted_drafts"}


def _alike(one: Any, other: Any) -> bool:
    """Equal, floats to five digits: a batch of another size may round logprobs otherwise."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-5)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)
