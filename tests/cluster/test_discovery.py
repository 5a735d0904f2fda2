"""Discovery against a real Kubernetes API server: what it sees, what it may see, and what a restart costs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import structlog

from services.discovery.kube import KubernetesSource
from services.discovery.registry import PodState, Registry, RegistryView, keep_watching
from sluice.rpc.messages import DecodeStatus
from sluice.types import Role
from tests.cluster.apiserver import READER, STRANGER, ApiServer
from tests.cluster.pods_api import PodsApi
from tests.unit.router.pairing_rig import lease_of, peers, running

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.slow,
    pytest.mark.timeout(180),
]
SELECTOR = "app.kubernetes.io/name=sluice"
SOON_S = 15.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    # Without its watch cache and with quick compaction the server really answers 410.
    flags = ("--watch-cache=false", "--etcd-compaction-interval=2s")
    with ApiServer(tmp_path_factory.mktemp("apiserver"), flags) as running:
        with running.client() as http:
            PodsApi(http).grant(READER, ["get", "list", "watch"])
        yield running


@pytest.fixture
def pods(server: ApiServer) -> Iterator[PodsApi]:
    with server.client() as http:
        api = PodsApi(http)
        yield api
        api.clear()


@pytest.fixture
def as_reader(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that discovery may do: get, list and watch pods."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(READER)))


@asynccontextmanager
async def discovering(watch_s: int = 60) -> AsyncIterator[Registry]:
    registry = Registry()
    source = KubernetesSource("default", SELECTOR, watch_s)
    task = asyncio.create_task(keep_watching(source, registry))
    try:
        yield registry
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def seen(registry: Registry, *expected: tuple[str, str, PodState]) -> RegistryView:
    """Until the view holds exactly these (role, address, state)."""
    last: set[tuple[str, str, PodState]] = set()
    try:
        async with asyncio.timeout(SOON_S):
            while True:
                last = {(p.role.value, p.address, p.state) for p in registry.view.pods}
                if last == set(expected):
                    return registry.view
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"saw {last}, problem {registry.view.problem!r}") from None


@pytest.mark.usefixtures("as_reader")
async def test_a_pods_whole_life(pods: PodsApi) -> None:
    pods.create("p", "prefill")
    async with discovering() as registry:
        await seen(registry)  # no address yet
        pods.set_status("p", "10.0.0.1", ready=False)
        await seen(registry, ("prefill", "10.0.0.1:7000", PodState.STARTING))
        pods.set_status("p", "10.0.0.1", ready=True)
        pods.ready("d", "decode", "10.0.0.2", annotations={"sluice.dev/port": "9000"})
        pods.ready("r", "router", "10.0.0.3")
        decode = ("decode", "10.0.0.2:9000", PodState.READY)
        await seen(registry, ("prefill", "10.0.0.1:7000", PodState.READY), decode)
        pods.delete("p")
        await seen(registry, ("prefill", "10.0.0.1:7000", PodState.DRAINING), decode)
        pods.vanish("p")
        view = await seen(registry, decode)
    assert view.of(Role.DECODE)["10.0.0.2:9000"].name == "d"


@pytest.mark.usefixtures("as_reader")
async def test_watches_that_end_are_taken_up_where_they_ended(pods: PodsApi) -> None:
    pods.ready("a", "decode", "10.0.0.1")
    async with discovering(watch_s=1) as registry:
        await seen(registry, ("decode", "10.0.0.1:7000", PodState.READY))
        await asyncio.sleep(1.5)
        pods.ready("b", "decode", "10.0.0.2")
        await seen(
            registry,
            ("decode", "10.0.0.1:7000", PodState.READY),
            ("decode", "10.0.0.2:7000", PodState.READY),
        )
        assert registry.view.problem == ""


@pytest.mark.usefixtures("as_reader")
async def test_a_version_too_old_is_listed_anew(pods: PodsApi) -> None:
    """Nothing of ours changes while others do, etcd compacts, and the version to watch from is gone: 410."""
    pods.ready("a", "decode", "10.0.0.1")
    with structlog.testing.capture_logs() as logs:
        async with discovering(watch_s=1) as registry:
            await seen(registry, ("decode", "10.0.0.1:7000", PodState.READY))
            async with asyncio.timeout(30):
                while not any(log["event"] == "discovery_relists" for log in logs):
                    pods.http.patch(
                        "/api/v1/namespaces/default",
                        json={"metadata": {"annotations": {"n": str(len(logs))}}},
                        headers={"content-type": "application/merge-patch+json"},
                    )
                    await asyncio.sleep(0.2)
            pods.ready("b", "decode", "10.0.0.2")
            await seen(
                registry,
                ("decode", "10.0.0.1:7000", PodState.READY),
                ("decode", "10.0.0.2:7000", PodState.READY),
            )


@pytest.mark.usefixtures("as_reader")
async def test_an_api_servers_restart_keeps_the_view_and_loses_no_change(
    server: ApiServer, pods: PodsApi
) -> None:
    pods.ready("a", "decode", "10.0.0.1")
    a = ("decode", "10.0.0.1:7000", PodState.READY)
    async with discovering() as registry:
        await seen(registry, a)
        await asyncio.to_thread(server.stop)
        async with asyncio.timeout(SOON_S):
            while not registry.view.problem:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert [pod.address for pod in registry.view.pods] == ["10.0.0.1:7000"], "the view stays"
        await asyncio.to_thread(server.start)
        pods.ready("b", "decode", "10.0.0.2")
        pods.vanish("a")
        await seen(registry, ("decode", "10.0.0.2:7000", PodState.READY))
        assert registry.view.problem == ""


async def test_without_the_role_it_says_what_is_missing_and_recovers(
    server: ApiServer, pods: PodsApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(STRANGER)))
    pods.ready("a", "decode", "10.0.0.1")
    async with discovering() as registry:
        async with asyncio.timeout(SOON_S):
            while not registry.view.problem:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert "403" in registry.view.problem
        assert "get, list and watch on pods" in registry.view.problem
        assert registry.view.pods == ()
        pods.grant(STRANGER, ["list", "watch"])
        await seen(registry, ("decode", "10.0.0.1:7000", PodState.READY))
        assert registry.view.problem == ""


@pytest.mark.usefixtures("as_reader")
async def test_no_stale_pod_is_picked_in_500_requests_under_churn(pods: PodsApi) -> None:
    """Pods come and go at the API server; once their deletion has been heard of, no request goes there."""
    answers = defaultdict[str, DecodeStatus | Exception](lambda: peers(("10.9.0.1:7000", "agreed")))
    pods.ready("p", "prefill", "10.9.0.1")
    for number in range(3):
        pods.ready(f"d{number}", "decode", f"10.0.1.{number}")
    alive, gone, picked = set[str](), set[str](), list[str]()

    def heard(view: RegistryView) -> None:
        decodes = view.of(Role.DECODE).items()
        now = {address for address, pod in decodes if pod.state is not PodState.DRAINING}
        gone.update(alive - now)
        alive.clear()
        alive.update(now)

    async def churn() -> None:
        for number in range(3, 30):
            await asyncio.to_thread(pods.ready, f"d{number}", "decode", f"10.0.1.{number}")
            # Asked to go, as by kubectl: it stays, with a deletion timestamp, while it finishes its streams.
            await asyncio.to_thread(pods.delete, f"d{number - 3}")
            if number > 6:
                await asyncio.to_thread(pods.vanish, f"d{number - 7}")

    source = KubernetesSource("default", SELECTOR)
    async with running(answers, source=source, any_prefill=False, pair_wait_s=5.0) as pairing:
        pairing._registry.listen(heard)
        churning = asyncio.create_task(churn())
        while len(picked) < 500 or not churning.done():
            async with AsyncExitStack() as leases:
                lease = await lease_of(pairing, leases, wait_s=SOON_S)
                assert lease.pair.decode not in gone
                picked.append(lease.pair.decode)
                await asyncio.sleep(0.005)
        await churning
    assert len(gone) > 10
    assert len(set(picked)) > 10
