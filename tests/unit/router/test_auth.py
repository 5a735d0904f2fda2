"""API keys at the router: what is open, what is closed, who is told what, and how many at once."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from services.router.auth import Auth
from sluice.apikeys import ApiKey, ApiKeys, digest_of, new_secret
from sluice.errors import ConfigError
from tests.unit.router.one_pair import StubDecode, app_over

_SECRET, _OPERATOR, _ONE = new_secret(), new_secret(), new_secret()
_BODY = {"prompt": "hi", "max_tokens": 3}
_CLOSED = ["/v1/models", "/v1/nothing", "/tokenize", "/openapi.json", "/docs"]
_OPERATORS = [
    "/metrics",
    "/",
    "/status.json",
    "/nothing",
    "/v1",
    "/health/",
    "//health",
    "/ready/x",
]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    lines = [
        ApiKey("alice", digest_of(_SECRET)),
        ApiKey("ops", digest_of(_OPERATOR), operator=True),
        ApiKey("one", digest_of(_ONE), max_concurrent=1),
    ]
    file.write_text("\n".join(key.line() for key in lines))
    return file


def _client(keys: Path, secret: str | None = None, decode: StubDecode | None = None) -> Any:
    app = app_over(decode or StubDecode(), api_keys_file=keys, max_body_bytes=1000)
    headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://router", headers=headers)


@pytest.mark.asyncio
async def test_health_and_ready_are_open_and_all_else_is_closed(keys: Path) -> None:
    async with _client(keys) as client:
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 200
        for path in _CLOSED + _OPERATORS:
            assert (await client.get(path)).status_code == 401, path
        assert (await client.post("/v1/completions", json=_BODY)).status_code == 401


@pytest.mark.asyncio
async def test_no_key_and_a_wrong_one_are_openais_401(keys: Path) -> None:
    wrong = new_secret()
    async with _client(keys) as client:
        with structlog.testing.capture_logs() as logs:
            for header in (
                None,
                "Bearer",
                "Bearer ",
                f"Bearer {wrong}",
                f"Token {_SECRET}",
                _SECRET,
            ):
                headers = {} if header is None else {"authorization": header}
                answer = await client.post("/v1/completions", json=_BODY, headers=headers)
                assert answer.status_code == 401, header
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.json()["error"]["type"] == "invalid_request_error"
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
                assert answer.headers["www-authenticate"] == 'Bearer realm="sluice"'
                assert answer.headers["x-request-id"]
    text = json.dumps(logs, default=str)
    assert "request_refused" in text
    assert wrong not in text
    assert _SECRET not in text


@pytest.mark.asyncio
async def test_a_key_opens_the_api_and_only_an_operators_the_rest(keys: Path) -> None:
    async with _client(keys, _SECRET) as client:
        assert (await client.post("/v1/completions", json=_BODY)).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200
        for path in _OPERATORS:
            refused = await client.get(path)
            assert refused.status_code == 403, path
            assert refused.json()["error"]["code"] == "OperatorOnly"
            assert "www-authenticate" not in refused.headers
    async with _client(keys, _OPERATOR) as client:
        assert (await client.get("/nothing")).status_code == 404
        assert (await client.post("/v1/completions", json=_BODY)).status_code == 200


@pytest.mark.asyncio
async def test_a_browser_may_look_with_basic_credentials_but_not_post(keys: Path) -> None:
    """A browser sends them along with any page's request, so they must not be able to do anything."""
    basic = base64.b64encode(f"me:{_OPERATOR}".encode()).decode()
    async with _client(keys) as client:
        headers = {"authorization": f"Basic {basic}"}
        assert (await client.get("/nothing", headers=headers)).status_code == 404
        posted = await client.post("/v1/completions", json=_BODY, headers=headers)
        assert posted.status_code == 401
        assert "Basic" not in posted.headers["www-authenticate"]
        asked = await client.get("/")
        assert asked.headers.get_list("www-authenticate") == [
            'Bearer realm="sluice"',
            'Basic realm="sluice"',
        ]
        for rest in ("!", "bm9jb2xvbg==", base64.b64encode(b"\xff:\xff").decode()):
            answer = await client.get("/", headers={"authorization": f"Basic {rest}"})
            assert answer.status_code == 401


class _Holding(StubDecode):
    """Answers wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def generate(self, call: Any) -> AsyncGenerator[Any]:
        async for event in super().generate(call):
            yield event
            await self.go.wait()


@pytest.mark.asyncio
async def test_a_key_has_only_so_many_requests_at_once(keys: Path) -> None:
    decode = _Holding()
    async with _client(keys, _ONE, decode) as client:
        first = asyncio.create_task(client.post("/v1/completions", json=_BODY))
        async with asyncio.timeout(10):
            while not decode.calls:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        busy = await client.post("/v1/completions", json=_BODY)
        assert busy.status_code == 429
        assert int(busy.headers["retry-after"]) >= 1
        assert busy.headers["x-should-retry"] == "true"
        assert busy.json()["error"]["type"] == "rate_limit_error"
        assert busy.json()["error"]["code"] == "KeyBusy"
        assert (await client.get("/v1/models")).status_code == 200
        others = {"authorization": f"Bearer {_SECRET}"}
        other = asyncio.create_task(client.post("/v1/completions", json=_BODY, headers=others))
        decode.go.set()
        assert [(await task).status_code for task in (first, other)] == [200, 200]
        assert (await client.post("/v1/completions", json=_BODY)).status_code == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("ending", [RuntimeError, asyncio.CancelledError])
async def test_a_request_that_fails_or_is_cancelled_is_counted_out(
    keys: Path, ending: type[BaseException]
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ending

    auth = Auth(app, keys=ApiKeys(keys))
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {_ONE}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    for _ in range(3):
        with pytest.raises(ending):
            await auth(scope, None, send)  # type: ignore[arg-type]
    assert sent == []


@given(header=st.binary(max_size=80), method=st.sampled_from(["GET", "POST"]), basic=st.booleans())
def test_no_header_opens_anything_or_breaks_anything(
    tmp_path_factory: pytest.TempPathFactory, header: bytes, method: str, basic: bool
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("a stranger got through")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    file = tmp_path_factory.getbasetemp() / "fuzzed keys"
    file.write_text(ApiKey("alice", digest_of(_SECRET)).line())
    value = b"Basic " + base64.b64encode(header) if basic else header
    scope = {
        "type": "http",
        "method": method,
        "path": "/v1/models",
        "headers": [(b"authorization", value)],
    }
    asyncio.run(Auth(app, keys=ApiKeys(file))(scope, None, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 401


@pytest.mark.asyncio
async def test_a_stranger_is_refused_before_the_body_is_read(keys: Path) -> None:
    async def receive() -> Message:
        raise AssertionError("the body of a stranger was read")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    app = app_over(StubDecode(), api_keys_file=keys)
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [],
        "query_string": b"",
    }
    await app(scope, receive, send)
    assert sent[0]["status"] == 401


@pytest.mark.asyncio
async def test_a_websocket_is_closed(keys: Path) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("a WebSocket got through")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await Auth(app, keys=ApiKeys(keys))({"type": "websocket", "path": "/health"}, None, send)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.asyncio
async def test_the_keys_name_is_in_the_log_and_the_key_is_not(keys: Path) -> None:
    decode = StubDecode()
    seen: list[dict[str, Any]] = []
    generate = decode.generate

    async def watched(call: Any) -> AsyncGenerator[Any]:
        seen.append(dict(structlog.contextvars.get_contextvars()))
        async for event in generate(call):
            yield event

    decode.generate = watched  # type: ignore[method-assign]
    async with _client(keys, _SECRET, decode) as client:
        await client.post("/v1/completions", json=_BODY)
    assert seen[0]["api_key"] == "alice"
    assert _SECRET not in json.dumps(seen, default=str)


@pytest.mark.asyncio
async def test_a_body_too_large_is_still_a_413(keys: Path) -> None:
    async with _client(keys, _SECRET) as client:
        answer = await client.post("/v1/completions", content=b"x" * 1001)
    assert answer.status_code == 413


@pytest.mark.asyncio
async def test_the_openapi_document_says_what_wants_a_key(keys: Path) -> None:
    async with _client(keys, _SECRET) as client:
        document = (await client.get("/openapi.json")).json()
    assert document["components"]["securitySchemes"] == {
        "ApiKey": {"type": "http", "scheme": "bearer"}
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (path not in ("/health", "/ready")), path
    open_one = app_over(StubDecode()).openapi()
    assert "securitySchemes" not in open_one["components"]


def test_a_bad_file_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("alice nothash")
    with pytest.raises(ConfigError, match="bad, line 1"):
        app_over(StubDecode(), api_keys_file=tmp_path / "bad")
