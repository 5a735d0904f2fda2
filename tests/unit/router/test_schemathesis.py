"""Schemathesis reads the OpenAPI document and tries what it allows, and what it doesn't: never a 500."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case
from schemathesis.specs.openapi import checks

from tests.unit.router.one_pair import StubDecode, app_over

_SCHEMA = schemathesis.openapi.from_asgi(
    "/openapi.json", app_over(StubDecode(), max_model_tokens=1 << 20)
)
_CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
_GENERATING = "/v1/(chat/)?completions"
_settings = settings(
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# Fields that only go with others, or that only the running server can judge.
_UNLINKED = (
    "model", "max_completion_tokens", "min_tokens", "best_of", "timeout_s", "prompt_logprobs",
    "top_logprobs", "stop_token_ids", "logit_bias", "stream_options", "reasoning_effort",
    "structured_outputs", "tool_choice",
)  # fmt: skip


def _check(case: Case) -> int:
    response = case.call()
    # A body may set a deadline that nothing can keep.
    assert response.status_code < 500 or response.status_code == 504, response.text
    case.validate_response(response, checks=_CHECKS)
    return response.status_code


@_SCHEMA.include(path_regex=_GENERATING).parametrize()
@settings(_settings, max_examples=25)
def test_generating(case: Case) -> None:
    _check(case)


@_SCHEMA.exclude(path_regex=_GENERATING).parametrize()
@settings(_settings, max_examples=15)
def test_the_rest(case: Case) -> None:
    _check(case)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_much_of_what_the_document_allows_is_served(path: str) -> None:
    """Else the tests above would only ever see refusals. No document knows the vocabulary."""
    statuses: Counter[int] = Counter()

    @settings(_settings, max_examples=25)
    @given(case=_SCHEMA[path]["POST"].as_strategy())
    def try_all(case: Case) -> None:
        case.body = _fitting(case.body)
        statuses[_check(case)] += 1

    try_all()
    assert statuses[200] > sum(statuses.values()) / 3, statuses


def _fitting(body: dict[str, Any]) -> dict[str, Any]:
    """``body`` without what a JSON schema can't rule out."""
    body = {name: value for name, value in body.items() if name not in _UNLINKED}
    for name, most in (("max_tokens", 8), ("n", 3)):
        if body.get(name) is not None:
            body[name] = min(body[name], most)
    return body
