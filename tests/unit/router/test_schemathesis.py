"""Schemathesis reads the OpenAPI document and tries what it allows, and what it doesn't: never a 500."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import Case
from schemathesis.specs.openapi import checks

from tests.unit.router.one_pair import StubDecode, app_over

_SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", app_over(StubDecode()))
_CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
_GENERATING = "/v1/(chat/)?completions"


def _check(case: Case) -> None:
    response = case.call()
    # A body may set a deadline that nothing can keep.
    assert response.status_code < 500 or response.status_code == 504, response.text
    case.validate_response(response, checks=_CHECKS)


_settings = settings(
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@_SCHEMA.include(path_regex=_GENERATING).parametrize()
@settings(_settings, max_examples=25)
def test_generating(case: Case) -> None:
    _check(case)


@_SCHEMA.exclude(path_regex=_GENERATING).parametrize()
@settings(_settings, max_examples=15)
def test_the_rest(case: Case) -> None:
    _check(case)
