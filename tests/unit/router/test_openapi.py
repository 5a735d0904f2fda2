"""The OpenAPI document says what the router does: paths, fields, statuses, real answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.router.openai.chat_schema import ChatCompletion, ChatRequest
from services.router.openai.completion_schema import Completion, CompletionRequest
from tests.unit.router.one_pair import StubDecode, app_over, post

_APP = app_over(StubDecode())
_DOCUMENT: dict[str, Any] = _APP.openapi()
_GENERATING = {"/v1/completions": "CompletionRequest", "/v1/chat/completions": "ChatRequest"}


def _operations() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (path, method, operation)
        for path, methods in _DOCUMENT["paths"].items()
        for method, operation in methods.items()
    ]


def test_the_paths() -> None:
    assert {path for path, _, _ in _operations()} == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{model_id}",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
    }


def test_no_operation_promises_fastapis_own_errors() -> None:
    for path, method, operation in _operations():
        assert "422" not in operation["responses"], (path, method)
    assert "HTTPValidationError" not in _DOCUMENT["components"]["schemas"]


@pytest.mark.parametrize("path", sorted(_GENERATING))
def test_generating_operations_document_streams_and_every_error(path: str) -> None:
    responses = _DOCUMENT["paths"][path]["post"]["responses"]
    assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    expected = {"200", "400", "404", "408", "413", "429", "500", "503", "504", "default"}
    assert set(responses) == expected
    for status in expected - {"200"}:
        schema = responses[status]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorBody"}


@pytest.mark.parametrize(
    ("name", "model"), [("CompletionRequest", CompletionRequest), ("ChatRequest", ChatRequest)]
)
def test_every_field_is_documented_and_others_are_allowed(name: str, model: Any) -> None:
    schema = _DOCUMENT["components"]["schemas"][name]
    assert set(schema["properties"]) == set(model.model_fields)
    assert schema["additionalProperties"] is True


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/completions", {"prompt": "a", "n": 2}, Completion),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, ChatCompletion),
    ],
)
def test_a_real_answer_has_every_field_the_document_requires(
    path: str, body: dict[str, Any], model: Any
) -> None:
    answer = post(_APP, path, json.dumps(body).encode()).json()
    schema = _DOCUMENT["components"]["schemas"][model.__name__]
    assert set(schema["required"]) <= set(answer) <= set(schema["properties"])
    model.model_validate(answer)
