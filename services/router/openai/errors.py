"""Failures in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from sluice.errors import BadRequest, InternalError, SluiceError
from sluice.telemetry.logging import get_logger

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    499: "request_cancelled",
    503: "service_unavailable",
    504: "timeout_error",
}
_RETRY_AFTER_S = 1
# Fields with objects inside, and no unions on the way.
_NESTED = frozenset(
    {"messages", "tools", "response_format", "structured_outputs", "stream_options"}
)
_log = get_logger(__name__)


class ModelNotFound(BadRequest):
    """The body names a model that this router doesn't serve."""

    http_status = 404
    code = "model_not_found"  # OpenAI's own


class ContextLengthExceeded(BadRequest):
    """Prompt and answer don't fit the model's context; clients shorten the chat at this code."""

    code = "context_length_exceeded"  # OpenAI's own


class ErrorDetail(BaseModel):
    """``param`` names the offending field; ``code`` is the failure's stable name."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail


Answers = dict[int | str, dict[str, Any]]
# For the OpenAPI document. "default" also keeps FastAPI from promising a 422 that never comes.
ANSWERS: Answers = {status: {"model": ErrorBody} for status in (400, 404, 408, 413, "default")}
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
STREAM_ANSWERS: Answers = {
    200: {"content": {"text/event-stream": {"schema": _EVENT}}},
    **ANSWERS,
    **{status: {"model": ErrorBody} for status in (429, 500, 503, 504)},
}


def error_body(error: SluiceError) -> ErrorBody:
    kind = _TYPES.get(error.http_status, "server_error")
    param = error.field or None if isinstance(error, BadRequest) else None
    return ErrorBody(error=ErrorDetail(message=str(error), type=kind, param=param, code=error.code))


def error_response(error: SluiceError) -> JSONResponse:
    """The status of `sluice.errors`, and whether trying again can help (as openai-python reads it)."""
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if error.http_status in (429, 503):
        headers["retry-after"] = str(math.ceil(error.retry_after_s or _RETRY_AFTER_S))
    return JSONResponse(error_body(error).model_dump(), error.http_status, headers)


async def on_sluice_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, SluiceError)
    return error_response(error)


async def on_validation_error(request: Request, error: Exception) -> JSONResponse:
    """A body of the wrong form: 400 (not FastAPI's 422), naming the first field at fault."""
    assert isinstance(error, RequestValidationError)
    if isinstance(error.body, bytes):  # FastAPI reads JSON only where it is called that
        kind = request.headers.get("content-type", "")
        return error_response(
            BadRequest(
                f"the body's content-type is {kind!r}" if kind else "the body has no content-type",
                remedy="send content-type: application/json",
            )
        )
    return error_response(bad_request_of(error.errors()))


def bad_request_of(problems: Sequence[Any]) -> BadRequest:
    first = problems[0]
    path = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return BadRequest(f"the body is not JSON: {first['ctx']['error']}")
    field = _field(path)
    given = _short(first.get("input"))
    reason = first["msg"].removeprefix("Value error, ")
    return BadRequest(f"{field or 'body'}: {reason}; got {given}", field=field)


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    kind = _TYPES.get(error.status_code, "server_error")
    asked = f"{request.method} {request.url.path}"
    detail = ErrorDetail(message=f"{error.detail}: {asked}", type=kind)
    if error.status_code == 404:
        detail.code = "unknown_url"  # OpenAI's own
        detail.message = f"this server has no {asked} (a client's base URL ends in /v1; paths are listed at /docs)"
    return JSONResponse(ErrorBody(error=detail).model_dump(), error.status_code, error.headers)


async def on_bug(request: Request, error: Exception) -> JSONResponse:
    """Anything untyped. The client learns the class, the log everything."""
    _log.error("router_untyped_error", exc_info=error)
    bug = InternalError(f"{type(error).__name__} in the router", stage="route")
    response = error_response(bug)
    # Starlette sends this one from outside all middleware.
    response.headers["x-request-id"] = request.state.request_id
    return response


def _field(path: Sequence[Any]) -> str:
    """``messages[0].role``, and the bare name where a path goes on in pydantic's own terms."""
    match path:
        case []:
            return ""
        case [name, int(index), *_] if name not in _NESTED:
            return f"{name}[{index}]"
        case [name, *_] if name not in _NESTED:
            return str(name)
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)  # ASCII: half a surrogate pair is no UTF-8
    return text if len(text) <= 80 else text[:77] + "..."
