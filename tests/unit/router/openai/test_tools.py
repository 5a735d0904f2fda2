"""Tool calls and reasoning of a chat: what the model is told and held to, and what the client gets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI

from sluice.text.chat import ChatTemplate
from sluice.types import FinishReason, GrammarKind
from tests.integration.router_harness import TEMPLATE, TOKENIZER
from tests.unit.router.one_pair import ToldDecode, app_over, ask, post, told

_CHAT = "/v1/chat/completions"
_USER = {"role": "user", "content": "hi"}
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TOOL = {"type": "function", "function": {"name": "weather", "parameters": _PARAMETERS}}
_PING = {"type": "function", "function": {"name": "ping"}}
_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
_ARGUMENTS = '{"city": "Paris"}'
_THINKS = ChatTemplate(
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    "{% if think is defined %}<think>{% if not think %}\n\n</think>\n\n{% endif %}{% endif %}"
    "{% if reasoning_effort is defined %}({{ reasoning_effort }}){% endif %}",
    {},
)


def _app(
    decode: ToldDecode, template: ChatTemplate | None = TEMPLATE, **settings: object
) -> FastAPI:
    return app_over(decode, template, max_model_tokens=4000, **settings)


def _body(**more: object) -> dict[str, Any]:
    return {"messages": [_USER], "tools": [_TOOL, _PING], **more}


def test_a_whole_call() -> None:
    app = _app(told("Let me see.\n", _CALL[:20], _CALL[20:]))
    (choice,) = ask(app, _CHAT, **_body())["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": _ARGUMENTS}
    assert call["id"].startswith("call_")
    assert (message["content"], message["refusal"]) == ("Let me see.", None)


def test_content_is_null_when_there_are_only_calls() -> None:
    (choice,) = ask(_app(told(f"{_CALL}\n{_CALL}")), _CHAT, **_body())["choices"]
    assert choice["message"]["content"] is None
    ids = [call["id"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 2


def test_a_streamed_call_comes_in_pieces() -> None:
    app = _app(told("Hm. ", *_CALL, "\n", *_CALL))
    *events, done = ask(app, _CHAT, **_body(), stream=True)
    assert done == "[DONE]"
    choices = [event["choices"][0] for event in events]
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    for index in range(2):
        first, *rest = [delta for delta in deltas if delta["index"] == index]
        assert (first["type"], first["function"]["name"]) == ("function", "weather")
        assert first["id"].startswith("call_")
        assert all("id" not in delta and "name" not in delta["function"] for delta in rest)
        assert len(rest) > 5
        pieces = [delta["function"]["arguments"] for delta in (first, *rest)]
        assert "".join(pieces) == _ARGUMENTS
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hm."
    assert [choice["finish_reason"] for choice in choices][-1] == "tool_calls"
    assert all(choice["delta"] or choice["finish_reason"] for choice in choices), "no empty chunks"


def test_a_call_cut_by_the_length_limit_is_no_call() -> None:
    app = _app(told(_CALL[:40], reason=FinishReason.LENGTH))
    (choice,) = ask(app, _CHAT, **_body())["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (_CALL[:40], "length")
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("more", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
def test_without_tools_a_call_is_text_and_the_model_hears_of_none(more: dict[str, Any]) -> None:
    decode = told(_CALL)
    (choice,) = ask(_app(decode), _CHAT, **_body(**more))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (_CALL, "stop")
    assert "weather" not in TOKENIZER.decode(decode.calls[0].prompt)
    assert decode.calls[0].sampling.grammar is None


def test_a_template_without_tools_still_tells_the_model() -> None:
    decode = told("x")
    ask(_app(decode), _CHAT, **_body())
    prompt = TOKENIZER.decode(decode.calls[0].prompt)
    assert prompt.startswith("[system]")
    assert json.dumps(_TOOL) in prompt
    assert "<tool_call>" in prompt
    assert decode.calls[0].sampling.grammar is None, "the model is free to call or not"


@pytest.mark.parametrize(
    ("more", "inside", "outside"),
    [
        ({"tool_choice": "required"}, ["weather", "ping"], ["start: /"]),
        (
            {"tool_choice": {"type": "function", "function": {"name": "ping"}}},
            ["ping"],
            ["weather"],
        ),
        ({"parallel_tool_calls": False}, ["start: /", "seek"], [")*"]),
        ({"tools": [{**_TOOL, "function": {**_TOOL["function"], "strict": True}}]}, ["seek"], []),
        ({"response_format": {"type": "json_object"}}, ["weather"], ["start: /", "seek"]),
    ],
)
def test_what_the_model_is_held_to(
    more: dict[str, Any], inside: list[str], outside: list[str]
) -> None:
    decode = told("x")
    ask(_app(decode), _CHAT, **_body(**more))
    grammar = decode.calls[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    for text in inside:
        assert text in grammar.text
    for text in outside:
        assert text not in grammar.text


def test_calls_and_results_of_the_history_reach_the_model() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
    history = [
        _USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "pong"}]},
    ]
    decode = told("x")
    ask(_app(decode), _CHAT, messages=history)
    prompt = TOKENIZER.decode(decode.calls[0].prompt)
    assert '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>' in prompt
    assert "<tool_response>\npong\n</tool_response>" in prompt


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_apart_from_the_answer(stream: bool) -> None:
    app = _app(told("<think>\nhm", "m\n</thi", "nk>\n\nyes ", _CALL), _THINKS)
    answer = ask(app, _CHAT, **_body(stream=stream))
    choices = [event["choices"][0] for event in (answer[:-1] if stream else [answer])]
    holders = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    assert "".join(holder.get("reasoning_content") or "" for holder in holders) == "hmm"
    assert "".join(holder.get("content") or "" for holder in holders) == "yes"
    assert sum(len(holder.get("tool_calls", [])) for holder in holders) >= 1
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("think", "reasoning", "content"), [(True, "hm", "yes"), (False, None, "hm</think>yes")]
)
def test_the_prompt_says_whether_the_answer_begins_with_reasoning(
    think: bool, reasoning: str | None, content: str
) -> None:
    app = _app(told("hm</think>yes"), _THINKS)
    body = {"messages": [_USER], "chat_template_kwargs": {"think": think}}
    message = ask(app, _CHAT, **body)["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_a_form_is_for_what_follows_the_reasoning() -> None:
    decode = told("x")
    app = _app(decode, _THINKS)
    form = {"type": "json_object"}
    for variables in ({"think": True}, {"think": False}):
        body = {"messages": [_USER], "response_format": form, "chat_template_kwargs": variables}
        ask(app, _CHAT, **body)
    first, second = [call.sampling.grammar for call in decode.calls]
    assert first is not None
    assert second is not None
    assert "</think>" in first.text
    assert second.kind is GrammarKind.JSON_SCHEMA


def test_reasoning_effort_is_the_templates() -> None:
    decode = told("x")
    ask(_app(decode, _THINKS), _CHAT, messages=[_USER], reasoning_effort="low")
    assert "(low)" in TOKENIZER.decode(decode.calls[0].prompt)
    refused = post(
        _app(decode, TEMPLATE),
        _CHAT,
        json.dumps({"messages": [_USER], "reasoning_effort": "low"}).encode(),
    )
    assert refused.json()["error"]["param"] == "reasoning_effort"


def test_settings_choose_the_format() -> None:
    kimi = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    app = _app(told(kimi), tool_format="kimi", reasoning="think")
    message = ask(app, _CHAT, **_body())["choices"][0]["message"]
    assert [call["id"] for call in message["tool_calls"]] == ["functions.ping:0"]
    thought = ask(_app(told("<think>a</think>b"), reasoning="think"), _CHAT, messages=[_USER])
    assert thought["choices"][0]["message"]["reasoning_content"] == "a"
