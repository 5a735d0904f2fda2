"""A prompt and an answer that don't fit the model, in OpenAI's words: clients shorten the chat when they read them."""

from __future__ import annotations

import json

import pytest

from tests.unit.router.one_pair import StubDecode, app_over, post


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a" * 30, "max_tokens": 1}, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 30}, "max_tokens"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * 30}], "max_tokens": 1},
            "messages",
        ),
    ],
)
def test_too_long_for_the_context(path: str, body: dict[str, object], param: str) -> None:
    app = app_over(StubDecode(), max_model_tokens=20)
    response = post(app, path, json.dumps(body).encode())
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "maximum context length is 20 tokens" in error["message"]
    assert response.headers["x-should-retry"] == "false"
