"""What probes and stock tools see: reflection, health that tells the truth about the peer, idle pods that stay idle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from sluice.rpc.client import DecodeClient
from tests.e2e.pods import Pair, Pod, eventually, free_port, generate

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(180)]

IDLE_SECONDS = 6.0
IDLE_SHARE = 0.02  # of one core


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Pair]:
    pair = Pair.create(
        tmp_path_factory.mktemp("pair"),
        model_dir,
        prefill_metrics_listen=f"127.0.0.1:{free_port()}",
        decode_metrics_listen=f"127.0.0.1:{free_port()}",
    )
    pair.start()
    asyncio.run(pair.ready())
    yield pair
    pair.kill()


def over_http(pod: Pod, path: str) -> tuple[int, str]:
    answer = httpx.get(f"http://{pod.settings['metrics_listen']}{path}", trust_env=False)
    return answer.status_code, answer.text


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_stock_client_reads_health_and_layout_through_reflection(pair: Pair, role: str) -> None:
    """Nothing of ours is imported by such a client: the descriptors come from the pod."""
    pod = pair.prefill if role == "prefill" else pair.decode
    service = f"sluice.v1.{role.capitalize()}"
    with grpc.insecure_channel(pod.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {service, "grpc.health.v1.Health"} <= set(database.get_services())
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName(service).methods_by_name["GetLayout"]
        request = message_factory.GetMessageClass(method.input_type)
        response = message_factory.GetMessageClass(method.output_type)
        call = channel.unary_unary(
            f"/{service}/GetLayout",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        layout = call(request(), timeout=5).layout
    assert layout.role == role
    names = [component.name for component in layout.components]
    assert "draft.swa" in names
    assert names.index("draft.swa") > max(i for i, n in enumerate(names) if n.startswith("target."))
    assert pod.health(service)


def test_readiness_follows_the_peer_and_liveness_does_not(pair: Pair) -> None:
    names = ("sluice.v1.Decode", "sluice.layout")

    async def all_are(serving: bool, timeout_s: float) -> None:
        async def look() -> bool:
            http_too = (over_http(pair.decode, "/ready")[0] == 200) == serving
            return http_too and all(pair.decode.health(name) == serving for name in names)

        await eventually(look, timeout_s, f"{names} at {serving}")
        assert pair.decode.health()
        assert over_http(pair.decode, "/live") == (200, "ok\n")

    async def agreed() -> None:
        async def look() -> bool:
            http_too = over_http(pair.prefill, "/ready")[0] == 200
            return http_too and pair.prefill.health("sluice.layout")

        await eventually(look, 5, "prefill ready: a decode pod has agreed")

    async def follow() -> None:
        await all_are(True, 5)
        await agreed()
        pair.prefill.freeze()
        await all_are(False, 6)
        async with DecodeClient(pair.decode.address) as client:
            status = await client.get_status(2.0)
        assert not status.ready
        assert pair.prefill.address in status.reason
        assert pair.prefill.address in over_http(pair.decode, "/ready")[1]
        pair.prefill.thaw()
        await all_are(True, 10)
        assert len((await generate(pair, (5, 6, 7))).token_ids) == 16

    asyncio.run(follow())


def test_idle_pods_stay_idle(pair: Pair) -> None:
    asyncio.run(pair.ready())
    processes = [psutil.Process(pod.pid) for pod in (pair.prefill, pair.decode)]

    def cpu_seconds(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    before = [cpu_seconds(process) for process in processes]
    asyncio.run(asyncio.sleep(IDLE_SECONDS))
    for process, began in zip(processes, before, strict=True):
        share = (cpu_seconds(process) - began) / IDLE_SECONDS
        assert share < IDLE_SHARE, f"pid {process.pid} used {share:.1%} of a core while idle"
