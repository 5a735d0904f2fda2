"""Numbers of bodies: JSON knows no integers, so 7.0 is one; 7.5, true and "7" are none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.router.one_pair import StubDecode, app_over, ask, post

_WHOLE = ("max_tokens", "n", "seed", "top_k", "logprobs", "min_tokens")


def test_whole_floats_are_integers() -> None:
    decode = StubDecode()
    app = app_over(decode)
    plain: dict[str, Any] = {
        "prompt": [5, 6], "max_tokens": 4, "n": 2, "seed": 3, "top_k": 9, "stop_token_ids": [7],
    }  # fmt: skip
    answer = ask(app, "/v1/completions", **plain)
    written: Any = json.loads(json.dumps(plain), parse_int=float)
    assert written["prompt"] == [5.0, 6.0]
    again = ask(app, "/v1/completions", **written)
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in answer["choices"]]
    mixed = ask(app, "/v1/completions", **{**plain, "prompt": [[5.0, 6], "a"]})
    assert [c["text"] for c in mixed["choices"][:2]] == [c["text"] for c in answer["choices"]]
    calls = [call.sampling for call in decode.calls]
    assert calls[:2] == calls[2:4] == calls[4:6]
    assert all(type(number) is int for number in (calls[2].max_tokens, *decode.calls[2].prompt))


@pytest.mark.parametrize("field", _WHOLE)
@pytest.mark.parametrize("value", [1.5, True, "1", 1e999, [1]])
def test_nothing_else_is(field: str, value: object) -> None:
    body = json.dumps({"prompt": "a", field: value}).encode()
    response = post(app_over(StubDecode()), "/v1/completions", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] in (field, "")


@pytest.mark.parametrize("prompt", [[1.5], [True], [[2, "a"]], [], [[]]])
def test_odd_prompts_are_refused(prompt: object) -> None:
    body = json.dumps({"prompt": prompt}).encode()
    response = post(app_over(StubDecode()), "/v1/completions", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "prompt"


def test_the_document_keeps_the_bounds() -> None:
    schema = app_over(StubDecode()).openapi()["components"]["schemas"]["CompletionRequest"]
    forms = {name: schema["properties"][name]["anyOf"][0] for name in _WHOLE if name != "seed"}
    assert {name: form["minimum"] for name, form in forms.items()} == {
        "max_tokens": 0, "n": 1, "top_k": -1, "logprobs": 0, "min_tokens": 0,
    }  # fmt: skip
    assert forms["logprobs"]["maximum"] == 20
