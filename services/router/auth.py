"""Who may ask the router for what: API keys, before anything of a request's body is read.

The rule, by path: ``/health`` and ``/ready`` are open, since probes and load balancers have no key. The API (``/v1/``,
``/tokenize``, ``/detokenize``, the OpenAPI document) is for any key. All else, such as ``/metrics`` and the status
page, shows what everybody does and is for operators' keys; so a path that nobody thought of is closed.
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Security
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.router.openai.errors import error_response
from sluice.apikeys import ApiKey, ApiKeys
from sluice.errors import Overloaded, SluiceError
from sluice.telemetry.logging import bind, get_logger

_OPEN = ("/health", "/ready")
_API = ("/tokenize", "/detokenize", "/openapi.json", "/docs", "/redoc")
_API_PREFIX = "/v1/"
_log = get_logger(__name__)
# For the OpenAPI document alone: who may ask is settled before any route is reached.
BEARER = Security(HTTPBearer(scheme_name="ApiKey", auto_error=False))


class InvalidApiKey(SluiceError):
    http_status = 401

    @property
    def code(self) -> str:
        return "invalid_api_key"  # as OpenAI calls it


class OperatorOnly(SluiceError):
    http_status = 403


class KeyBusy(Overloaded):
    """A key has as many requests running as it may have."""


class Auth:
    """Middleware. A browser may show a page with a key as the password of basic authentication, any user name."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys
        self._running: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in _OPEN):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            try:
                key = self._admit(scope)
                with self._counted(key, scope["method"]):
                    await self._app(scope, receive, send)
            except (InvalidApiKey, OperatorOnly, KeyBusy) as error:
                _log.warning("request_refused", path=scope["path"], error=str(error))
                response = error_response(error)
                if error.http_status == 401:
                    for challenge in _challenges(scope["method"]):
                        response.headers.append("www-authenticate", challenge)
                await response(scope, receive, send)
        else:  # no route of ours; a WebSocket is refused by closing it
            await send({"type": "websocket.close", "code": 1008})

    def _admit(self, scope: Scope) -> ApiKey:
        secret = _secret(Headers(scope=scope).get("authorization", ""), scope["method"])
        if secret is None:
            raise InvalidApiKey(
                "no API key", stage="auth", remedy="send the header Authorization: Bearer KEY"
            )
        key = self._keys.find(secret)
        if key is None:
            raise InvalidApiKey("the API key is not known here", stage="auth")
        bind(api_key=key.name)
        path = scope["path"]
        if not (path.startswith(_API_PREFIX) or path in _API or key.operator):
            raise OperatorOnly(
                f"{path} is for operators; the key {key.name} is not one's",
                stage="auth",
                remedy="use a key made with: sluice keys new NAME --operator",
            )
        return key

    @contextmanager
    def _counted(self, key: ApiKey, method: str) -> Iterator[None]:
        """Only what can generate counts: a client that looks up its model is never busy."""
        if method != "POST":
            yield
            return
        limit = key.max_concurrent
        if limit is not None and self._running[key.name] >= limit:
            raise KeyBusy(
                f"the key {key.name} has {limit} requests running, as many as it may",
                stage="auth",
                remedy="wait for one to end",
            )
        self._running[key.name] += 1
        try:
            yield
        finally:
            self._running[key.name] -= 1


def _secret(header: str, method: str) -> str | None:
    scheme, _, rest = header.partition(" ")
    if scheme.lower() == "bearer" and rest.strip():
        return rest.strip()
    # A browser sends basic credentials by itself, also for another site's page: they can only look.
    if scheme.lower() == "basic" and method in ("GET", "HEAD"):
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return None
    return None


def _challenges(method: str) -> list[str]:
    """One header each: Chromium doesn't look behind a comma."""
    return ['Bearer realm="sluice"'] + ['Basic realm="sluice"'] * (method in ("GET", "HEAD"))
