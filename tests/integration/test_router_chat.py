"""Chat over scripted decode pods: the prompt that is rendered, the answer's shape, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.errors import BadRequest, TransferFailed
from sluice.text.chat import ChatTemplate
from sluice.types import FinishReason
from tests.integration.router_harness import (
    MODEL,
    READY,
    TEMPLATE,
    TOKENIZER,
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

_USER = ("user", "hi")


@pytest.mark.asyncio
async def test_whole_answer() -> None:
    decode = ScriptedDecode([says("Hello", " wor", "ld", reason=FinishReason.STOP)])
    async with router_over(decode, template=TEMPLATE) as stack:
        response = await stack.chat(("system", "S"), _USER, max_tokens=7, temperature=0, seed=9)
    body = response.json()
    assert response.status_code == 200, response.text
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    assert body["id"].startswith("chatcmpl-")
    assert body["id"] == response.headers["x-request-id"]
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"]["completion_tokens"] == 4
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    (call,) = decode.calls
    assert TOKENIZER.decode(call.prompt) == "[system]S[user]hi[assistant]"
    assert call.prompt.count(0) == 1, "bos once: the template wrote it"
    assert (call.sampling.max_tokens, call.sampling.seed) == (7, 9)


@pytest.mark.asyncio
@pytest.mark.parametrize("with_usage", [False, True])
async def test_stream(with_usage: bool) -> None:
    options = {"include_usage": True} if with_usage else None
    async with router_over(ScriptedDecode([says("Hello", " world")]), template=TEMPLATE) as stack:
        response = await stack.chat(_USER, stream=True, stream_options=options)
    *chunks, done = sse_events(response)
    assert done == "[DONE]"
    usage = chunks.pop() if with_usage else None
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"] for choice in middle] == [{"content": "Hello"}, {"content": " world"}]
    assert last["delta"] == {}
    reasons = [choice["finish_reason"] for choice in (first, *middle, last)]
    assert reasons == [None, None, None, "length"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["id"] for chunk in chunks} == {response.headers["x-request-id"]}
    assert all(("usage" in chunk) == with_usage for chunk in chunks)
    if usage is not None:
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 4


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("content", "rendered"),
    [
        ("one", "one"),
        ("", ""),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
    ],
)
async def test_contents(content: object, rendered: str) -> None:
    decode = ScriptedDecode([says("x")])
    async with router_over(decode, template=TEMPLATE) as stack:
        response = await stack.chat(
            ("developer", "D"), ("assistant", "A"), ("user", content), add_generation_prompt=False
        )
    assert response.status_code == 200, response.text
    assert TOKENIZER.decode(decode.calls[0].prompt) == f"[system]D[assistant]A[user]{rendered}"


@pytest.mark.asyncio
async def test_bos_is_the_templates_business_unless_asked_for() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ '!' if loud }}", {})
    decode = ScriptedDecode([says("x")])
    async with router_over(decode, template=template) as stack:
        await stack.chat(_USER)
        await stack.chat(_USER, add_special_tokens=True, chat_template_kwargs={"loud": True})
        taken = await stack.chat(_USER, chat_template_kwargs={"messages": []})
    assert [call.prompt for call in decode.calls] == [ids("hi"), TOKENIZER.encode("hi!")]
    assert taken.status_code == 400
    assert taken.json()["error"]["param"] == "chat_template_kwargs"


@pytest.mark.asyncio
async def test_limits_under_both_names_and_the_context_without_one() -> None:
    decode = ScriptedDecode([says("x")])
    async with router_over(decode, template=TEMPLATE) as stack:
        await stack.chat(_USER, max_tokens=3)
        await stack.chat(_USER, max_completion_tokens=4)
        await stack.chat(_USER, max_completion_tokens=5, max_tokens=5)
        await stack.chat(_USER)
        both = await stack.chat(_USER, max_completion_tokens=5, max_tokens=6)
    asked = [call.sampling.max_tokens for call in decode.calls]
    assert asked == [3, 4, 5, 200 - len(decode.calls[0].prompt)]
    assert both.status_code == 400
    assert both.json()["error"]["param"] == "max_completion_tokens"


@pytest.mark.asyncio
async def test_a_pod_without_a_limit_does_not_make_chats_one_token_long() -> None:
    decode = ScriptedDecode([says("x")], replace(READY, max_model_tokens=0))
    async with router_over(decode, template=TEMPLATE) as stack:
        assert (await stack.chat(_USER)).status_code == 200
    assert decode.calls[0].sampling.max_tokens == 1024


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_cuts_and_cancels(stream: bool) -> None:
    decode = ScriptedDecode([says("one E", "N", "D two", " three")])
    async with router_over(decode, template=TEMPLATE) as stack:
        response = await stack.chat(_USER, stop=["END"], stream=stream)
        await decode.closed.wait()
    if stream:
        *chunks, done = sse_events(response)
        assert (sse_text(chunks), done) == ("one ", "[DONE]")
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        choice = response.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("one ", "stop")


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_on_request(stream: bool) -> None:
    async with router_over(ScriptedDecode([says("H", "ey")]), template=TEMPLATE) as stack:
        response = await stack.chat(_USER, stream=stream, return_token_ids=True)
    events = sse_events(response)[:-1] if stream else [response.json()]
    choices = [event["choices"][0] for event in events]
    got = [id_ for choice in choices for id_ in choice.get("token_ids", [])]
    assert got == list(ids("Hey"))


@pytest.mark.asyncio
async def test_without_a_template_chat_is_refused_with_the_remedy() -> None:
    async with router_over(ScriptedDecode([says("x")])) as stack:
        chat = await stack.chat(_USER)
        text = await stack.post(prompt="hi")
    assert (chat.status_code, text.status_code) == (400, 200)
    error = chat.json()["error"]
    assert error["param"] == "messages"
    assert "no chat template" in error["message"]
    assert "chat_template.jinja" in error["message"]
    assert "/v1/completions" in error["message"]


@pytest.mark.asyncio
async def test_a_template_that_refuses_is_a_400() -> None:
    template = ChatTemplate("{{ raise_exception('only one system turn') }}", {})
    async with router_over(ScriptedDecode([says("x")]), template=template) as stack:
        response = await stack.chat(_USER)
    assert response.status_code == 400
    assert "only one system turn" in response.json()["error"]["message"]


def _named(name: str, parameters: object = None, **more: object) -> dict[str, object]:
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **more}}


def _schema(schema: object, **more: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **more}}


_SCHEMA_FIELD = "response_format.json_schema.schema"
_TOOL = _named("f", {"type": "object"})
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_RESULT = {"role": "tool", "content": "r", "tool_call_id": "c"}
_TURN = {"role": "user", "content": "a"}
_BODIES: list[tuple[dict[str, object], str | None]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role"),
    ({"messages": [_TURN, {"role": "assistant", "content": None}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ({"messages": [{**_TURN, "name": 5}]}, "messages[0].name"),
    ({"messages": [{**_TURN, "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{**_TURN, "tool_calls": [_CALL]}]}, "messages[0]"),
    ({"messages": [_TURN, {"role": "assistant", "tool_calls": [_CALL]}, _RESULT]}, None),
    ({"messages": [{**_TURN, "tool_calls": [], "refusal": None, "annotations": []}]}, None),
    ({"messages": [{"role": "user", "content": "a" * 300}]}, "messages"),
    ({"messages": [_TURN], "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": [_TURN], "max_completion_tokens": 200}, "max_tokens"),
    ({"messages": [_TURN], "n": 17}, "n"),
    ({"messages": [_TURN], "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": [_TURN], "tools": [_TOOL, _TOOL]}, "tools"),
    ({"messages": [_TURN], "tools": [_named("a b")]}, "tools[0].function.name"),
    ({"messages": [_TURN], "tools": [_TOOL], "tool_choice": "maybe"}, "tool_choice"),
    ({"messages": [_TURN], "tools": [_TOOL], "tool_choice": _named("g")}, "tool_choice"),
    (
        {"messages": [_TURN], "tools": [_named("f", {"type": 5})], "tool_choice": "required"},
        "tools[0].function.parameters",
    ),
    (
        {"messages": [_TURN], "tools": [_named("f", {"not": {}}, strict=True)]},
        "tools[0].function.parameters",
    ),
    ({"messages": [_TURN], "functions": [{"name": "f"}]}, "functions"),
    ({"messages": [_TURN], "reasoning_effort": "low"}, "reasoning_effort"),
    (
        {"messages": [_TURN], "response_format": {"type": "json_schema"}},
        "response_format.json_schema",
    ),
    ({"messages": [_TURN], "response_format": _schema({"type": "nothing"})}, _SCHEMA_FIELD),
    ({"messages": [_TURN], "response_format": _schema({"not": {}}, strict=True)}, _SCHEMA_FIELD),
    ({"messages": [_TURN], "response_format": _schema({"not": {}})}, None),
    ({"messages": [_TURN], "response_format": _schema("no object")}, _SCHEMA_FIELD),
    ({"messages": [_TURN], "tools": [], "tool_choice": "auto"}, None),
    ({"messages": [_TURN], "tool_choice": "required"}, "tool_choice"),
    ({"messages": [_TURN], "response_format": {"type": "json_object"}}, None),
    ({"messages": [_TURN], "response_format": {"type": "text"}}, None),
    ({"messages": [_TURN], "logprobs": True, "top_logprobs": 20}, None),
    ({"messages": [_TURN], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": [_TURN], "echo": True}, "echo"),
    ({"messages": [_TURN], "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"messages": [_TURN], "logprobs": False, "top_logprobs": 0}, None),
    ({"messages": [_TURN], "top_logprobs": 3}, "top_logprobs"),
    ({"messages": [_TURN], "chat_template": "{{ 1 }}"}, "chat_template"),
    ({"messages": [_TURN], "modalities": ["audio"]}, "modalities"),
    ({"messages": [_TURN], "model": "gpt-5"}, "model"),
]


@pytest.mark.asyncio
async def test_bodies() -> None:
    """Each is refused naming the field before any pod is asked, or served."""
    decode = ScriptedDecode([says("x")])
    async with router_over(decode, template=TEMPLATE) as stack:
        for body, param in _BODIES:
            calls = len(decode.calls)
            response = await stack.http.post("/v1/chat/completions", json=body)
            if param is None:
                assert response.status_code == 200, (body, response.text)
                continue
            assert response.status_code == (404 if param == "model" else 400), (body, response.text)
            error = response.json()["error"]
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), body
            assert response.headers["x-request-id"]
            assert len(decode.calls) == calls


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_byte_is_retried(stream: bool) -> None:
    decode = ScriptedDecode([fails(TransferFailed("lost bytes")), says("fine")])
    async with router_over(decode, template=TEMPLATE) as stack:
        response = await stack.chat(_USER, stream=stream)
    assert response.status_code == 200
    assert response.text.count("fine") == 1
    assert len({call.attempt_id for call in decode.calls}) == 2


@pytest.mark.asyncio
async def test_no_role_is_sent_before_the_first_text() -> None:
    """Else the status line would be out, and a failure could not have its own."""
    async with router_over(ScriptedDecode([fails(BadRequest("no"))]), template=TEMPLATE) as stack:
        response = await stack.chat(_USER, stream=True)
    assert response.status_code == 400


@pytest.mark.asyncio
async def test_an_error_after_the_first_byte_is_an_event_without_done() -> None:
    decode = ScriptedDecode([fails(TransferFailed("it broke"), "some")])
    async with router_over(decode, template=TEMPLATE) as stack:
        events = sse_events(await stack.chat(_USER, stream=True))
    assert events[-1]["error"]["code"] == "TransferFailed"
    assert sse_text(events[:-1]) == "some"


@pytest.mark.asyncio
async def test_one_deadline() -> None:
    async with router_over(ScriptedDecode([hangs()]), template=TEMPLATE) as stack:
        response = await stack.chat(_USER, timeout_s=0.5)
    assert response.status_code == 504


@pytest.mark.asyncio
async def test_a_client_that_leaves_cancels_the_pod() -> None:
    decode = ScriptedDecode([hangs("some")])
    async with router_over(decode, template=TEMPLATE) as stack:
        body = {"messages": [_TURN], "stream": True}
        async with stack.http.stream("POST", "/v1/chat/completions", json=body) as response:
            await anext(response.aiter_lines())
            assert decode.open == 1
        await until(lambda: decode.open == 0, 2.0)
