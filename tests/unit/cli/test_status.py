"""``sluice status``: what it reads, what it prints, and its exit codes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from rich.console import Console

from sluice.cli import status
from sluice.cli.__main__ import main
from sluice.cli.endpoint import Endpoint
from sluice.errors import ConfigError

_READY = {
    "ready": True,
    "pairs": [{"decode": "d:1", "prefill": "p:1"}],
    "reasons": ["decode d:2: no"],
}
_FLEET = {
    "pods": [
        {"role": "decode", "address": "d:1", "state": "ready", "in_use": 3, "capacity": 8},
        {"role": "prefill", "address": "p:1", "state": None, "in_use": 1, "capacity": 0},
        {"role": "decode", "address": "d:2", "state": "ready", "in_use": 0, "problem": "gone"},
    ],
    "pairs": [
        {"decode": "d:1", "prefill": "p:1", "state": "agreed", "in_flight": 3},
        {"decode": "d:2", "prefill": "p:1", "state": "refused", "reason": "geometry.page_tokens"},
    ],
}


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Answers by path, for what ``sluice status`` asks; a path without one is a 404."""
    answers: dict[str, Any] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        found = answers.get(request.url.path)
        if found is None:
            return httpx.Response(404, json={"detail": "not found"})
        return httpx.Response(
            503 if found == "busy" or not found.get("ready", True) else 200, json=found
        )

    def client(endpoint: Endpoint, timeout_s: float) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url=endpoint.url)

    monkeypatch.setattr(status, "http_client", client)
    return answers


def test_ready_and_not(router: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    router["/ready"] = _READY
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert "d:1" in out
    assert "decode d:2: no" in out
    router["/ready"] = {"ready": False, "pairs": [], "reasons": ["no prefill has agreed"]}
    assert main(["status"]) == 1
    out = capsys.readouterr().out
    assert "not ready" in out
    assert "no prefill has agreed" in out


def test_the_fleet_where_the_router_shows_it(
    router: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    router |= {"/ready": _READY, "/status.json": _FLEET}
    assert main(["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [pair["state"] for pair in shown["pairs"]] == ["agreed", "refused"]
    assert [pod["running"] for pod in shown["pods"]] == ["3/8", "1", "0"]
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    for text in ("refused", "geometry.page_tokens", "gone", "known from decode", "3/8"):
        assert text in out


def test_somebody_else_is_not_taken_for_a_router(
    router: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    router["/ready"] = {"status": "ok"}
    assert main(["status"]) == 2
    assert "not as a Sluice router" in capsys.readouterr().err


def test_watch_wants_seconds(router: dict[str, Any]) -> None:
    for words in (["--watch", "0"], ["--watch", "--json"]):
        assert main(["status", *words]) == 2
    with pytest.raises(ConfigError):
        status.run(_args(watch=-1.0))


def _args(**values: object) -> Any:
    import argparse

    return argparse.Namespace(**({"watch": None, "json": False} | values))


@pytest.mark.asyncio
async def test_watching_goes_on_when_the_router_comes_and_goes(
    router: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    stages = iter([{}, {"/ready": _READY}, {}])

    class Enough(Exception):
        pass

    async def pause(_: float) -> None:
        shown.append(console.export_text())
        router.clear()
        try:
            router.update(next(stages))
        except StopIteration:
            raise Enough from None

    console = Console(record=True, force_terminal=False, width=120)
    monkeypatch.setattr(status.asyncio, "sleep", pause)
    router["/ready"] = _READY
    args = _args(watch=1.0, url="http://r", api_key="", ca=None)
    with pytest.raises(Enough):
        await status._watch(args, console)
    assert len(shown) == 4
