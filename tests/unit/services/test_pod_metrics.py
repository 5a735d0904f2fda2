"""Health over HTTP: what the event loop says, and what is said when it says nothing."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from services import pod_metrics
from services.pod_metrics import Health, served
from sluice.errors import ConfigError
from sluice.telemetry.metrics import Metrics
from tests.e2e.pods import free_port


def _get(listen: str, path: str) -> tuple[int, str]:
    answer = httpx.get(f"http://{listen}{path}", trust_env=False, timeout=10)
    return answer.status_code, answer.text.strip()


@pytest.mark.asyncio
async def test_a_hung_event_loop_is_neither_alive_nor_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a pod whose loop stands still would be sent requests for ever: the last word it had was "ready"."""
    monkeypatch.setattr(pod_metrics, "_LOOP_ANSWERS_S", 0.2)
    listen = f"127.0.0.1:{free_port()}"
    health = Health("", "")
    async with served(Metrics(), listen, lambda: health):
        assert await asyncio.to_thread(_get, listen, "/live") == (200, "ok")
        assert await asyncio.to_thread(_get, listen, "/ready") == (200, "ok")
        health = Health("", "no prefill has agreed")
        assert await asyncio.to_thread(_get, listen, "/live") == (200, "ok")
        assert await asyncio.to_thread(_get, listen, "/ready") == (503, "no prefill has agreed")
        with ThreadPoolExecutor() as others:
            paths = ("/live", "/ready", "/metrics")
            asked = [others.submit(_get, listen, path) for path in paths]
            live, ready, metrics = (answer.result(10) for answer in asked)  # the loop stands still
    assert live[0] == ready[0] == 503
    assert "event loop" in live[1]
    assert metrics[0] == 200, "metrics are served all the same"


@pytest.mark.asyncio
async def test_a_taken_port_is_refused_with_its_setting() -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with served(Metrics(), listen, lambda: Health("", "")):
        with pytest.raises(ConfigError, match="metrics_listen"):
            async with served(Metrics(), listen, lambda: Health("", "")):
                pass
