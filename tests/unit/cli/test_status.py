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
_POOLS = [
    {"space": "PAGE", "total": 10, "free": 4, "held": 6, "quarantined": 0, "cached": 0},
    {"space": "REQUEST_SLOT", "total": 8, "free": 1, "held": 5, "quarantined": 1, "cached": 1},
]
_LOAD = {"queued": 2, "running": 3, "capacity": 8, "pools": _POOLS, "drafting": None}
_IDLE = _LOAD | {"running": 0, "capacity": 0, "pools": []}
_DRAFTING = {"drafting": {"recent_tokens": 2.5, "steps": 9, "collapsed": False}}
_GOOD = {"ready": True, "reason": ""}
_PAIR = {"decode": "d:1", "prefill": "p:1", "state": "agreed", "reason": "", "usable": True}
_PAIR |= {"breaker": "closed", "in_flight": 3, "canary": None}
_CANARY = {"age_s": 4.2, "seconds": 0.0312, "failure": ""}
_FLEET = {
    "alarms": ["acceptance fell to 1"],
    "pods": [
        {"role": "decode", "address": "d:1", **_GOOD, **_LOAD, **_DRAFTING},
        {"role": "prefill", "address": "p:1", **_GOOD, **_IDLE},
        {"role": "decode", "address": "d:2", "ready": False, "reason": "gone", **_IDLE},
    ],
    "pairs": [
        _PAIR | {"canary": _CANARY},
        _PAIR
        | {"decode": "d:2", "state": "refused", "usable": False, "reason": "geometry.page_tokens"},
        _PAIR | {"decode": "d:3", "usable": False, "breaker": "open"},
    ],
    "totals": {
        "answers": 9,
        "failures": 1,
        "running": 3,
        "waiting": 0,
        "answers_per_s": 1.5,
        "tokens_per_s": 60.0,
        "ttft_p50_s": 0.1,
        "ttft_p95_s": None,
    },
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
    router: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router |= {"/ready": _READY, "/status.json": _FLEET}
    assert main(["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [pair["state"] for pair in shown["pairs"]] == ["agreed", "refused", "agreed"]
    assert [pod["fullest"] for pod in shown["pods"]] == ["REQUEST_SLOT 75 %", "", ""]
    assert shown["totals"]["tokens_per_s"] == 60.0
    monkeypatch.setenv("COLUMNS", "150")
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    for text in (
        "! acceptance fell to 1",
        "1.5 answers/s, 60 tokens/s, 3 running, 0 waiting, 1 failed; TTFT p50 100 ms\n",
        "3/8",
        "2.50",
        "31 ms, 4 s ago",
        "geometry.page_tokens",
        "breaker open",
        "gone",
    ):
        assert text in out, text


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
