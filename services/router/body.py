"""Limits on a request's body: its size, and the time it may take to arrive."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.router.openai.errors import error_response
from sluice.errors import BadRequest


class BodyTooLarge(BadRequest):
    http_status = 413


class BodyTooSlow(BadRequest):
    http_status = 408
    retryable = True


class BodyLimit:
    """Middleware. The application behind it sees a body that is whole."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, body_timeout_s: float) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._body(scope, receive)
        except BadRequest as error:
            await error_response(error)(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None when the client left before its end."""
        stated = Headers(scope=scope).get("content-length", "")
        if stated.isdecimal():
            self._check_size(int(stated))
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    self._check_size(len(body))
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError as error:
            raise BodyTooSlow(
                f"the body did not arrive within {self._body_timeout_s:g} s",
                remedy="send it faster, or raise body_timeout_s of the router",
            ) from error

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            raise BodyTooLarge(
                f"the body has at least {num_bytes} bytes, the limit is {self._max_body_bytes}",
                remedy="send less, or raise max_body_bytes of the router",
            )


def _replay(body: bytes, receive: Receive) -> Receive:
    """``receive`` as if nothing had been read yet."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
