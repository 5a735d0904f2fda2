"""Composes a prefill pod and runs it: pod, peers, attempts, server; drained in the reverse order."""

from __future__ import annotations

import asyncio

from services.pod import SHOW_DEATH_S, Pod, open_pod, stop_on_signals
from services.pod_metrics import served
from services.prefill.attempts import Attempts
from services.prefill.metering import PrefillMetrics
from services.prefill.peers import Peers
from services.prefill.servicer import PrefillServicer
from services.prefill.settings import PrefillSettings
from services.tracing import open_tracing
from sluice.rpc.server import RpcServer, ServerConfig
from sluice.rpc.tls import PeerRole
from sluice.telemetry.logging import get_logger
from sluice.types import Role
from sluice.v1 import prefill_pb2_grpc

log = get_logger(__name__)
SERVICE = "sluice.v1.Prefill"
LAYOUT = "sluice.layout"  # health: at least one decode pod has agreed
_WATCH_EVERY_S = 1.0


async def serve(settings: PrefillSettings) -> None:
    """Run until SIGTERM or SIGINT, then drain: attempts first, the port last (see ``decode.peers``).

    Raises what a thread of the pod died of, so that whoever watches the process restarts it.
    """
    stopping = asyncio.Event()
    tls = settings.tls(PeerRole.PREFILL)
    async with (
        open_tracing("prefill", settings.otlp_endpoint) as tracing,
        open_pod(settings, Role.PREFILL) as pod,
    ):
        peers = Peers(
            pod.info.layout,
            pod.sides,
            forget_after_s=settings.forget_peer_s,
        )
        metrics = PrefillMetrics()
        peers.on_refused = lambda refusal: metrics.refused(refusal.causes())
        attempts = Attempts(pod.engine, pod.memory, pod.sides, pod.epoch, pod.faults, metrics)
        servicer = PrefillServicer(
            pod.info, peers, attempts, pod.engine, pod.worker, tracing, settings.max_running
        )
        server = RpcServer(
            ServerConfig(settings.listen, tls=tls, health_listen=settings.health_listen),
            lambda grpc: prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, grpc),
            (SERVICE,),
            (LAYOUT,),
        )
        metrics.watch(pod, lambda: servicer.status().ready)
        metrics.watch_attempts(
            lambda: len(peers),
            lambda: len(attempts),
            lambda: len(pod.worker.stuck()),
            lambda: pod.engine.latest_stats.prefix_bytes,
        )
        await server.start()
        watch = asyncio.create_task(_watch(pod, peers, server, stopping))
        log.info("listening", address=server.address, epoch=pod.epoch)
        async with served(metrics.metrics, settings.metrics_listen, servicer.health):
            with stop_on_signals(stopping.set):
                await stopping.wait()
            watch.cancel()
            servicer.draining = True
            for name in (SERVICE, LAYOUT):
                await server.set_serving(name, False)
            await attempts.drain(settings.drain_s)
            # Decode takes a refused connection for the end of our writes: every rank's I/O ends before the port closes.
            await pod.sides.close()
            await server.stop()
        pod.require_alive()


async def _watch(pod: Pod, peers: Peers, server: RpcServer, stopping: asyncio.Event) -> None:
    """Keep health true, forget peers that fell silent, and stop what is dead."""
    serving = paired = False
    while True:
        healthy = pod.dead is None
        if (healthy and len(peers) > 0) != paired:
            paired = not paired
            await server.set_serving(LAYOUT, paired)
        if healthy != serving:
            serving = healthy
            await server.set_serving(SERVICE, serving)
            if not healthy:
                await server.set_serving("", False)
                asyncio.get_running_loop().call_later(SHOW_DEATH_S, stopping.set)
        try:
            await peers.forget_silent()
        except Exception:  # a bug there must not freeze health
            log.exception("forget_failed")
        await asyncio.sleep(_WATCH_EVERY_S)
