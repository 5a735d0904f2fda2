"""What every request meets first: its id."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.telemetry.logging import bind
from sluice.telemetry.traceparent import KEY, set_current
from sluice.types import RequestId

_HEADER = "x-request-id"


class Edge:
    """Middleware. The id is the router's own, whatever the client sent, and is on every answer.

    ``observe`` hears of every answer's route, as declared, and status.
    """

    def __init__(self, app: ASGIApp, *, observe: Callable[[str, int], None]) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        _set_id(scope, RequestId(uuid.uuid4().hex))
        set_current(Headers(scope=scope).get(KEY, ""))  # a trace that the client began goes on

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_HEADER] = scope["state"]["request_id"]
                self._observe(_route(scope), message["status"])
            await send(message)

        await self._app(scope, receive, send_with_id)


def _route(scope: Scope) -> str:
    """What the router matched; nothing a client can make up."""
    return str(getattr(scope.get("route"), "path", "none"))


def name_request(request: Request, prefix: str) -> RequestId:
    """The request's id, from now on with ``prefix``: what the client sees, and the log."""
    request_id = RequestId(f"{prefix}-{request.state.request_id}")
    _set_id(request.scope, request_id)
    return request_id


def _set_id(scope: Scope, request_id: RequestId) -> None:
    scope.setdefault("state", {})["request_id"] = request_id
    bind(request_id=request_id)
