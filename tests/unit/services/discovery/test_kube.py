"""Discovery by the Kubernetes API when the API misbehaves: a stub server with scripted answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from services.discovery.kube import KubernetesSource, record_of
from services.discovery.registry import PodState, Registry, keep_watching
from sluice.types import Role

Event = dict[str, Any]


def pod(
    name: str, ip: str = "10.0.0.1", role: str = "decode", version: int = 1, **changes: Any
) -> Event:
    item: Event = {
        "metadata": {
            "name": name,
            "resourceVersion": str(version),
            "labels": {"app.kubernetes.io/component": role},
        },
        "spec": {"containers": [{"ports": [{"name": "grpc", "containerPort": 7000}]}]},
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]},
    }
    for part, value in changes.items():
        item[part].update(value)
    return item


@dataclass
class StubApi:
    """Each watch plays the next script: lines to send, then the stream is cut or kept open."""

    pods: list[Event] = field(default_factory=list)
    version: int = 10
    watches: list[list[bytes]] = field(default_factory=list)
    list_failures: list[int] = field(default_factory=list)  # statuses of the next lists
    lists: int = 0
    watched_from: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            self.lists += 1
            if self.list_failures:
                return web.Response(status=self.list_failures.pop(0), text="{}")
            meta = {"resourceVersion": str(self.version)}
            return web.json_response({"metadata": meta, "items": self.pods})
        self.watched_from.append(request.query["resourceVersion"])
        assert request.query["allowWatchBookmarks"] == "true"
        response = web.StreamResponse()
        await response.prepare(request)
        script = self.watches.pop(0) if self.watches else None
        for chunk in script or ():
            await response.write(chunk)
        if script is None:
            await asyncio.sleep(30)
        return response


def line(kind: str, item: Event) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


@asynccontextmanager
async def discovering(
    stub: StubApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Registry]:
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/here/pods", stub.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    kubeconfig = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(path))
    registry = Registry()
    task = asyncio.create_task(keep_watching(KubernetesSource("here", "a=b"), registry))
    try:
        yield registry
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.cleanup()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def names(registry: Registry) -> set[str]:
    return {record.name for record in registry.view.pods}


@pytest.mark.asyncio
async def test_events_cut_anywhere_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = line("ADDED", pod("b", "10.0.0.2", version=11))
    stub = StubApi([pod("a")], watches=[[whole[:20], whole[20:], line("DELETED", pod("a"))[:30]]])
    async with discovering(stub, tmp_path, monkeypatch) as registry:
        await until(lambda: names(registry) == {"a", "b"})
        await until(lambda: len(stub.watched_from) == 2)
        assert stub.watched_from == ["10", "11"], "the half event at the end counts for nothing"
        assert stub.lists == 1


@pytest.mark.asyncio
async def test_a_bookmark_moves_the_version_and_is_no_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookmark = line("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "99"}})
    stub = StubApi([pod("a")], watches=[[bookmark]])
    async with discovering(stub, tmp_path, monkeypatch) as registry:
        await until(lambda: len(stub.watched_from) == 2)
        assert stub.watched_from == ["10", "99"]
        assert names(registry) == {"a"}


@pytest.mark.asyncio
async def test_an_expired_version_in_the_stream_means_a_new_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod deleted while nobody watched is missing from the new list and must go."""
    gone = line("ERROR", {"kind": "Status", "code": 410, "message": "too old"})
    stub = StubApi([pod("a"), pod("b", "10.0.0.2")], watches=[[gone]])
    async with discovering(stub, tmp_path, monkeypatch) as registry:
        await until(lambda: names(registry) == {"a", "b"})
        stub.pods, stub.version = [pod("b", "10.0.0.2")], 20
        await until(lambda: names(registry) == {"b"})
        await until(lambda: stub.watched_from == ["10", "20"])
        assert registry.view.problem == "", "expiry is no trouble"


@pytest.mark.asyncio
async def test_failing_lists_keep_the_view_and_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = line("ERROR", {"kind": "Status", "code": 500, "message": "etcd is away"})
    stub = StubApi([pod("a")], watches=[[broken]])
    problems = set[str]()
    async with discovering(stub, tmp_path, monkeypatch) as registry:
        registry.listen(lambda view: problems.add(view.problem))
        await until(lambda: names(registry) == {"a"})
        stub.list_failures = [500, 503]
        await until(lambda: stub.lists >= 4)
        await until(lambda: registry.view.problem == "")
        assert names(registry) == {"a"}
    assert any("etcd is away" in problem for problem in problems)
    assert any("500" in problem for problem in problems)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (pod("a"), ("10.0.0.1:7000", PodState.READY)),
        (pod("a", "fd00::1"), ("[fd00::1]:7000", PodState.READY)),
        (
            pod("a", metadata={"annotations": {"sluice.dev/port": "81"}}),
            ("10.0.0.1:81", PodState.READY),
        ),
        (pod("a", status={"conditions": []}), ("10.0.0.1:7000", PodState.STARTING)),
        (pod("a", metadata={"deletionTimestamp": "now"}), ("10.0.0.1:7000", PodState.DRAINING)),
        (pod("a", status={"phase": "Failed"}), None),
        (pod("a", ""), None),
        (pod("a", role="router"), None),
        (pod("a", spec={"containers": [{"ports": [{"containerPort": 1}]}]}), None),
    ],
    ids=[
        "ready",
        "ipv6",
        "annotation",
        "starting",
        "draining",
        "ended",
        "no-ip",
        "router",
        "no-port",
    ],
)
def test_what_a_pod_object_means(item: Event, expected: tuple[str, PodState] | None) -> None:
    record = record_of(item)
    assert (record and (record.address, record.state)) == expected
    assert record is None or record.role is Role.DECODE
