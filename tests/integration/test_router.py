"""The router's HTTP face over scripted decode pods: answers, streams, usage, stop strings, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sluice.errors import DeadlineExceeded, LayoutRefused, Overloaded, TransferFailed
from sluice.rpc.messages import Finished, GenerateCall, Tokens
from sluice.types import FinishReason
from tests.integration.router_harness import (
    EOS,
    MODEL,
    PREFILL,
    TOKENIZER,
    USAGE,
    Event,
    ScriptedDecode,
    fails,
    ids,
    peer,
    router_over,
    says,
    sse_events,
    sse_text,
)


@pytest.mark.asyncio
async def test_whole_answer() -> None:
    async with router_over(ScriptedDecode([says("Hello", " wor", "ld")])) as stack:
        response = await stack.post(prompt="hi", max_tokens=7, temperature=0, top_k=5, seed=9)
        call = stack.decode.calls[0]
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "text_completion"
    assert body["model"] == MODEL
    assert body["id"] == response.headers["x-request-id"]
    assert body["choices"] == [
        {"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "length"}
    ]
    assert call.prompt == TOKENIZER.encode("hi")
    assert call.prefill_address == PREFILL
    assert (call.sampling.max_tokens, call.sampling.temperature) == (7, 0.0)
    assert (call.sampling.top_k, call.sampling.seed) == (5, 9)
    assert call.sampling.stop_token_ids == (EOS,)
    assert 100 < call.timeout_s <= 120


@pytest.mark.asyncio
async def test_usage_is_prefills_prompt_and_decodes_completion() -> None:
    async with router_over(ScriptedDecode([says("a")])) as stack:
        usage = (await stack.post(prompt="hi")).json()["usage"]
    assert usage["prompt_tokens"] == USAGE.prompt_tokens
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["completion_tokens"] == 4
    assert usage["total_tokens"] == 9
    assert usage["sluice"] == {
        "verify_steps": 2,
        "accepted_drafts": 1,
        "queue_s": 0.1,
        "prefill_s": 0.2,
        "transfer_s": 0.3,
        "transferred_bytes": 550,
    }


@pytest.mark.asyncio
async def test_stream() -> None:
    async with router_over(ScriptedDecode([says("Hello", " world")])) as stack:
        events = sse_events(await stack.post(prompt="hi", stream=True))
    assert events[-1] == "[DONE]"
    assert sse_text(events[:-1]) == "Hello world"
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, "length"]
    assert len({event["id"] for event in events[:-1]}) == 1
    assert all("usage" not in event for event in events[:-1])
    assert all("token_ids" not in event["choices"][0] for event in events[:-1])


@pytest.mark.asyncio
async def test_stream_with_usage() -> None:
    async with router_over(ScriptedDecode([says("Hello", " world")])) as stack:
        response = await stack.post(
            prompt="hi", stream=True, stream_options={"include_usage": True}
        )
    *chunks, last, done = sse_events(response)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_and_accepted_counts_on_request(stream: bool) -> None:
    async with router_over(ScriptedDecode([says("H", "ey", "!")])) as stack:
        response = await stack.post(prompt="hi", stream=stream, return_token_ids=True)
    choices = [e["choices"][0] for e in sse_events(response)[:-1]] if stream else None
    choices = choices or response.json()["choices"]
    assert [id_ for choice in choices for id_ in choice["token_ids"]] == list(ids("Hey!"))
    assert [n for choice in choices for n in choice["accepted_drafts"]] == [None, 1, 0]


@pytest.mark.asyncio
async def test_characters_split_over_tokens_arrive_whole() -> None:
    async def script(_: GenerateCall) -> AsyncIterator[Event]:
        for token in ids("aé日😀z"):
            yield Tokens((token,), 0)
        yield Finished(FinishReason.LENGTH, USAGE)

    async with router_over(ScriptedDecode([script])) as stack:
        events = sse_events(await stack.post(prompt="hi", stream=True))[:-1]
    texts = [event["choices"][0]["text"] for event in events]
    assert texts == ["a", "é", "日", "😀", "z", ""]


@pytest.mark.asyncio
async def test_eos_is_no_part_of_thesse_text() -> None:
    async def script(_: GenerateCall) -> AsyncIterator[Event]:
        yield Tokens(ids("ok"))
        yield Tokens((*ids("!"), EOS), 1)
        yield Finished(FinishReason.STOP, USAGE)

    async with router_over(ScriptedDecode([script])) as stack:
        choice = (await stack.post(prompt="hi")).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ok!", "stop")


@pytest.mark.asyncio
async def test_a_clients_stop_token_is_no_part_of_thesse_text() -> None:
    async def script(_: GenerateCall) -> AsyncIterator[Event]:
        yield Tokens(ids("ab"))
        yield Tokens(ids("c!"), 1)
        yield Finished(FinishReason.STOP, USAGE)

    async with router_over(ScriptedDecode([script])) as stack:
        body = {"prompt": "hi", "stop_token_ids": list(ids("!"))}
        choice = (await stack.post(**body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")


@pytest.mark.asyncio
async def test_ignore_eos_sends_no_eos_ids() -> None:
    async with router_over(ScriptedDecode([says("a")])) as stack:
        await stack.post(prompt="hi", ignore_eos=True, stop_token_ids=[7])
        sampling = stack.decode.calls[0].sampling
    assert sampling.ignore_eos
    assert sampling.stop_token_ids == (7,)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_across_tokens_cuts_and_cancels(stream: bool) -> None:
    decode = ScriptedDecode([says("one E", "N", "D two", " three")])
    async with router_over(decode) as stack:
        response = await stack.post(
            prompt="hi",
            stop=["END"],
            stream=stream,
            stream_options={"include_usage": True} if stream else None,
        )
        await decode.closed.wait()
    if stream:
        *chunks, last, done = sse_events(response)
        assert done == "[DONE]"
        assert sse_text(chunks) == "one "
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        usage = last["usage"]
    else:
        choice = response.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
        usage = response.json()["usage"]
    # Counted here: the pod was cancelled before it could report, so cached tokens stay unsaid.
    assert usage["completion_tokens"] == len(ids("one END two"))
    assert usage["prompt_tokens"] == len(TOKENIZER.encode("hi"))
    assert usage["prompt_tokens_details"] is None


@pytest.mark.asyncio
async def test_text_that_only_looked_like_a_stop_is_sent() -> None:
    async with router_over(ScriptedDecode([says("one E", "N")])) as stack:
        choice = (await stack.post(prompt="hi", stop="END")).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one EN", "length")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [TOKENIZER.encode("hi")]),
        ([5, 6, 7], [(5, 6, 7)]),
        (["a", "b"], [TOKENIZER.encode("a"), TOKENIZER.encode("b")]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
    ],
)
async def test_prompt_forms(prompt: object, expected: list[tuple[int, ...]]) -> None:
    async def echo(call: GenerateCall) -> AsyncIterator[Event]:
        yield Tokens(call.prompt)
        yield Finished(FinishReason.LENGTH, USAGE)

    async with router_over(ScriptedDecode([echo])) as stack:
        body = (await stack.post(prompt=prompt, return_token_ids=True)).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert [tuple(choice["token_ids"]) for choice in body["choices"]] == expected
    assert body["usage"]["completion_tokens"] == 4 * len(expected)


@pytest.mark.asyncio
async def test_a_streamed_list_of_prompts_finishes_each_choice() -> None:
    async with router_over(ScriptedDecode([says("x", "y")])) as stack:
        events = sse_events(await stack.post(prompt=["a", "b", "c"], stream=True))
    assert events[-1] == "[DONE]"
    choices = [event["choices"][0] for event in events[:-1]]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "xy"
        assert [choice["finish_reason"] for choice in mine][-1] == "length"


_BODIES: list[tuple[dict[str, object], str | None]] = [
    ({}, "prompt"),
    ({"prompt": ""}, None),  # one token: bos
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a"] * 17}, "prompt"),
    ({"prompt": "a" * 300}, "prompt"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, None),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 199}, "max_tokens"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "top_p": 0}, None),
    ({"prompt": "a", "top_p": -0.1}, "top_p"),
    ({"prompt": "a", "stop": ["", "b"]}, "stop"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
    ({"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids"),
    ({"prompt": "a", "timeout_s": 0}, "timeout_s"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 17}, "n"),
    ({"prompt": ["a", "b", "c"], "n": 6}, "n"),
    ({"prompt": "a", "n": 1}, None),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "echo": 1}, "echo"),
    ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": "a", "logit_bias": {"5": 1, "6": -100}}, None),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"five": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": 1, "05": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"258": 1}}, "logit_bias"),
    ({"prompt": "a", "presence_penalty": 0.5, "frequency_penalty": -2}, None),
    ({"prompt": "a", "presence_penalty": 2.1}, "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": -2.1}, "frequency_penalty"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "repetition_penalty": 1.5, "min_p": 0.1}, None),
    ({"prompt": "a", "min_p": 1.1}, "min_p"),
    ({"prompt": "a", "min_tokens": 3, "max_tokens": 3}, None),
    ({"prompt": "a", "min_tokens": 4, "max_tokens": 3}, "min_tokens"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
    ({"prompt": "a", "best_of": 1}, None),
    ({"prompt": "a", "best_of": 2, "n": 2}, None),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "suffix": "z"}, "suffix"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream_options": None, "store": True, "metadata": {}}, None),
    ({"prompt": "a", "response_format": {"type": "json_object"}}, None),
    ({"prompt": "a", "response_format": {"type": "grammar"}}, "response_format.type"),
    ({"prompt": "a", "structured_outputs": {}}, "structured_outputs"),
    ({"prompt": "a", "structured_outputs": {"regex": "[ab]+"}}, None),
    ({"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"prompt": "a", "structured_outputs": {"choice": ["a", "b"]}}, None),
    ({"prompt": "a", "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"prompt": "a", "structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
    ({"prompt": "a", "structured_outputs": {"json": {"type": 1}}}, "structured_outputs.json"),
    ({"prompt": "a", "user": "someone", "made_up": {"x": 1}}, None),
]


@pytest.mark.asyncio
async def test_bodies() -> None:
    """Each is refused with 400 naming the field before any pod is asked, or served."""
    async with router_over(ScriptedDecode([says("x")])) as stack:
        for body, param in _BODIES:
            calls = len(stack.decode.calls)
            response = await stack.post(**body)
            if param is None:
                assert response.status_code == 200, (body, response.text)
                continue
            assert response.status_code == 400, (body, response.text)
            error = response.json()["error"]
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), body
            assert param in error["message"]
            assert response.headers["x-should-retry"] == "false"
            assert len(stack.decode.calls) == calls


@pytest.mark.asyncio
async def test_a_body_that_is_not_json() -> None:
    async with router_over(ScriptedDecode([says("x")])) as stack:
        response = await stack.http.post(
            "/v1/completions", content=b"{nope", headers={"content-type": "application/json"}
        )
    assert response.status_code == 400
    assert "not JSON" in response.json()["error"]["message"]


@pytest.mark.asyncio
async def test_unknown_model_and_path() -> None:
    async with router_over(ScriptedDecode([says("x")])) as stack:
        model = await stack.post(model="gpt-5", prompt="a")
        path = await stack.http.get("/v1/nothing")
        method = await stack.http.get("/v1/completions")
    assert model.status_code == 404
    assert model.json()["error"]["code"] == "model_not_found"
    assert path.status_code == 404
    assert path.json()["error"]["code"] == "unknown_url"
    assert "GET /v1/nothing" in path.json()["error"]["message"]
    assert method.status_code == 405
    assert method.headers["allow"] == "POST"


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("queue is full"), 429, "rate_limit_error"),
        (LayoutRefused("page sizes differ"), 503, "service_unavailable"),
        (DeadlineExceeded("too slow"), 504, "timeout_error"),
        (KeyError("bug"), 500, "server_error"),
    ],
)
async def test_an_error_before_the_first_byte_has_its_own_status(
    stream: bool, error: Exception, status: int, kind: str
) -> None:
    async with router_over(ScriptedDecode([fails(error)]), retries=0) as stack:
        response = await stack.post(prompt="hi", stream=stream)
    assert response.status_code == status
    assert response.json()["error"]["type"] == kind
    assert response.headers["content-type"] == "application/json"
    assert ("retry-after" in response.headers) == (status in (429, 503))


@pytest.mark.asyncio
async def test_an_error_after_the_first_byte_is_an_event_without_done() -> None:
    decode = ScriptedDecode([fails(TransferFailed("it broke"), "some", " text"), says("again")])
    async with router_over(decode) as stack:
        response = await stack.post(prompt="hi", stream=True)
    events = sse_events(response)
    assert response.status_code == 200
    assert events[-1]["error"]["code"] == "TransferFailed"
    assert "[DONE]" not in events
    assert sse_text(events[:-1]) == "some text"
    assert len(decode.calls) == 1


@pytest.mark.asyncio
async def test_models_health_and_ready() -> None:
    async with router_over(ScriptedDecode([says("x")])) as stack:
        models = (await stack.http.get("/v1/models")).json()
        model = (await stack.http.get(f"/v1/models/{MODEL}")).json()
        other = await stack.http.get("/v1/models/other")
        health = await stack.http.get("/health")
        ready = await stack.http.get("/ready")
        address = stack.addresses[0]
    assert models["data"] == [model]
    assert (model["id"], model["max_model_len"]) == (MODEL, 200)
    assert other.status_code == 404
    assert health.status_code == 200
    assert ready.json() == {
        "ready": True,
        "pairs": [{"decode": address, "prefill": PREFILL}],
        "reasons": [],
    }


@pytest.mark.asyncio
async def test_not_ready_says_why_and_serves_nothing() -> None:
    decode = ScriptedDecode([says("x")], peer(state="refused", reason="page_tokens 64 != 128"))
    async with router_over(decode) as stack:
        ready = await stack.http.get("/ready")
        answer = await stack.post(prompt="hi")
        health = await stack.http.get("/health")
    assert ready.status_code == 503
    assert "page_tokens 64 != 128" in ready.json()["reasons"][0]
    assert answer.status_code == 503
    assert "page_tokens 64 != 128" in answer.json()["error"]["message"]
    assert health.status_code == 200
    assert decode.calls == []
