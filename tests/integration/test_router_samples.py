"""Several answers to one prompt, what stopped them, and tokens of a text, over scripted pods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.router.openai.intake import sample_seed
from sluice.errors import BadRequest
from sluice.rpc.messages import Finished, GenerateCall, Tokens
from sluice.types import FinishReason
from tests.integration.router_harness import (
    EOS,
    TEMPLATE,
    TOKENIZER,
    USAGE,
    Event,
    ScriptedDecode,
    fails,
    hangs,
    ids,
    router_over,
    says,
    sse_events,
    sse_text,
    until,
)


async def _seed_in_letters(call: GenerateCall) -> AsyncIterator[Event]:
    """Says its own prompt and seed, slowly, so that answers overlap."""
    for text in (TOKENIZER.decode(call.prompt), ":", str(call.sampling.seed)):
        yield Tokens(ids(text))
        await asyncio.sleep(0.02)
    yield Finished(FinishReason.STOP, USAGE)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_n_answers_to_each_prompt_come_prompt_by_prompt(stream: bool) -> None:
    decode = ScriptedDecode([_seed_in_letters])
    async with router_over(decode) as stack:
        response = await stack.post(prompt=["a", "b"], n=2, seed=7, stream=stream)
    if stream:
        chunks = sse_events(response)[:-1]
        texts = [sse_text(chunks, index) for index in range(4)]
        order = [chunk["choices"][0]["index"] for chunk in chunks]
        assert order != sorted(order), "the answers are interleaved"
    else:
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        texts = [choice["text"] for choice in choices]
    other = sample_seed(7, 1)
    assert texts == ["a:7", f"a:{other}", "b:7", f"b:{other}"]
    assert len({call.request_id for call in decode.calls}) == 4


@pytest.mark.asyncio
async def test_a_prompt_counts_once_however_many_answers_it_has() -> None:
    async with router_over(ScriptedDecode([says("x")]), template=TEMPLATE) as stack:
        usage = (await stack.chat(("user", "hi"), n=3)).json()["usage"]
    assert usage["prompt_tokens"] == USAGE.prompt_tokens
    assert usage["prompt_tokens_details"] == {"cached_tokens": USAGE.cached_tokens}
    assert usage["completion_tokens"] == 3 * USAGE.completion_tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["sluice"]["transferred_bytes"] == 3 * 550


@pytest.mark.asyncio
async def test_streamed_chat_answers_each_open_with_the_role_and_end_once() -> None:
    async with router_over(ScriptedDecode([_seed_in_letters]), template=TEMPLATE) as stack:
        events = sse_events(await stack.chat(("user", "hi"), n=3, stream=True))
    assert events.pop() == "[DONE]"
    for index in range(3):
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert [choice["delta"].get("role") for choice in mine] == ["assistant", *[None] * 4]
        assert [choice["finish_reason"] for choice in mine] == [*[None] * 4, "stop"]


@pytest.mark.asyncio
async def test_unseeded_answers_differ_in_their_seeds() -> None:
    decode = ScriptedDecode([says("x")])
    async with router_over(decode) as stack:
        await stack.post(prompt="a", n=4)
        await stack.post(prompt="a", n=4)
    assert len({call.sampling.seed for call in decode.calls}) == 8


@pytest.mark.asyncio
async def test_one_failing_answer_fails_the_body_and_cancels_the_others() -> None:
    decode = ScriptedDecode([hangs("x"), fails(BadRequest("no")), hangs("x")])
    async with router_over(decode) as stack:
        response = await asyncio.wait_for(stack.post(prompt="a", n=3), 5.0)
        await until(lambda: decode.open == 0, 2.0)
    assert response.status_code == 400


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one END")])
async def test_a_stop_string_stays_in_the_text_on_request(
    stream: bool, include: bool, text: str
) -> None:
    async with router_over(ScriptedDecode([says("one E", "N", "D two")])) as stack:
        response = await stack.post(
            prompt="a", stop="END", include_stop_str_in_output=include, stream=stream
        )
    if stream:
        assert sse_text(sse_events(response)[:-1]) == text
    else:
        assert response.json()["choices"][0]["text"] == text


@pytest.mark.asyncio
async def test_a_stop_token_too_but_no_special_one() -> None:
    async def script(_: GenerateCall) -> AsyncIterator[Event]:
        yield Tokens(ids("c!"))
        yield Finished(FinishReason.STOP, USAGE)

    async def eos(_: GenerateCall) -> AsyncIterator[Event]:
        yield Tokens((*ids("c"), EOS))
        yield Finished(FinishReason.STOP, USAGE)

    body = {"prompt": "a", "stop_token_ids": list(ids("!")), "include_stop_str_in_output": True}
    async with router_over(ScriptedDecode([script, eos])) as stack:
        texts = [(await stack.post(**body)).json()["choices"][0]["text"] for _ in range(2)]
    assert texts == ["c!", "c"]


@pytest.mark.asyncio
async def test_tokens_and_back() -> None:
    async with router_over(template=TEMPLATE, decodes=("127.0.0.1:9",)) as stack:

        async def tokens(**body: object) -> dict[str, object]:
            response = await stack.http.post("/tokenize", json=body)
            assert response.status_code == 200, response.text
            answer: dict[str, object] = response.json()
            return answer

        text = await tokens(prompt="hé", return_token_strs=True)
        bare = await tokens(prompt="hé", add_special_tokens=False)
        chat = await tokens(messages=[{"role": "user", "content": "hi"}])
        back = await stack.http.post("/detokenize", json={"tokens": text["tokens"]})
    assert text["tokens"] == list(TOKENIZER.encode("hé"))
    assert (text["count"], text["max_model_len"]) == (4, None)
    assert text["token_strs"] == ["<s>", "h", "Ã", "©"]
    assert bare["tokens"] == list(TOKENIZER.encode("hé"))[1:]
    assert chat["tokens"] == list(TOKENIZER.encode("<s>[user]hi[assistant]"))
    assert back.json() == {"prompt": "<s>hé"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        (
            "/tokenize",
            {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
            400,
            "prompt",
        ),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, 400, "messages"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, 400, "tools[0].type"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [5, 999]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [5], "model": "other"}, 404, "model"),
    ],
)
async def test_tokens_refused(path: str, body: dict[str, object], status: int, param: str) -> None:
    async with router_over(decodes=("127.0.0.1:9",)) as stack:
        response = await stack.http.post(path, json=body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


@pytest.mark.asyncio
async def test_a_body_over_the_limit_is_a_413_on_a_real_connection() -> None:
    async with router_over(ScriptedDecode([says("x")]), max_body_bytes=1 << 20) as stack:
        over = await stack.post(prompt="a" * (4 << 20))
        fine = await stack.post(prompt="a")
    assert over.status_code == 413
    assert over.json()["error"]["code"] == "BodyTooLarge"
    assert fine.status_code == 200
