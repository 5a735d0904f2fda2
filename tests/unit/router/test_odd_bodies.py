"""Whatever a client sends, it hears 200 or what is wrong with it; never a 500."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.openai.chat_schema import ChatMessage, ChatRequest
from services.router.openai.completion_schema import CompletionRequest
from services.router.openai.policy import CHAT_OFF, COMPLETION_OFF, MESSAGE_OFF
from services.router.openai.tokens import DetokenizeRequest, TokenizeRequest
from tests.unit.router.one_pair import StubDecode, app_over, post

_APP = app_over(StubDecode())
_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"
_FIELDS: dict[str, list[str]] = {
    _COMPLETIONS: [*CompletionRequest.model_fields, *COMPLETION_OFF],
    _CHAT: [*ChatRequest.model_fields, *CHAT_OFF],
    "/tokenize": [*TokenizeRequest.model_fields],
    "/detokenize": [*DetokenizeRequest.model_fields],
}
_GOOD: dict[str, dict[str, Any]] = {
    _COMPLETIONS: {"prompt": "hi"},
    _CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5, 6]},
}
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=())),  # lone surrogates too
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from([*ChatMessage.model_fields, *MESSAGE_OFF, "refusal"]),
        st.sampled_from(["user", "system", "developer", "tool", "a"])
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": _VALUES}), max_size=2)
        | _VALUES,
        max_size=4,
    ),
    max_size=3,
)


def _check(path: str, body: dict[str, Any]) -> None:
    response = post(_APP, path, json.dumps(body).encode())
    assert response.status_code in (200, 400, 404), (path, body, response.text)
    assert response.headers["x-request-id"]
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]


@pytest.mark.parametrize("path", sorted(_FIELDS))
@settings(max_examples=80, deadline=None)
@given(data=st.data(), with_good=st.booleans())
def test_any_json_gets_an_answer_or_a_reason(
    path: str, data: st.DataObject, with_good: bool
) -> None:
    names = st.sampled_from([*_FIELDS[path], "user", "made_up"])
    body = data.draw(st.dictionaries(names, _VALUES, max_size=6))
    _check(path, {**body, **_GOOD[path]} if with_good else body)


@settings(max_examples=80, deadline=None)
@given(_MESSAGES, st.booleans())
def test_any_messages_get_an_answer_or_a_reason(messages: list[Any], tokenize: bool) -> None:
    _check("/tokenize" if tokenize else _CHAT, {"messages": messages})


@pytest.mark.parametrize("path", [_COMPLETIONS, _CHAT])
@settings(max_examples=40, deadline=None)
@given(content=st.binary(max_size=60))
def test_any_bytes_get_a_reason(path: str, content: bytes) -> None:
    assert post(_APP, path, content).status_code in (200, 400)


@pytest.mark.parametrize("path", [_COMPLETIONS, _CHAT])
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ["\\udfff"]}',
        b'{"prompt": "a", "stop": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\udfff"}]}]}',
        b'{"messages": [{"role": "user", "content": "a", "name": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": {}}]}]}',
        b"NaN",
        b"",
    ],
)
def test_bodies_that_break_parsers(path: str, content: bytes) -> None:
    response = post(_APP, path, content)
    assert response.status_code == 400
    assert response.json()["error"]["message"]
