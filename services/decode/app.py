"""Composes a decode pod and runs it: pod, peers, attempts, server; drained in the reverse order."""

from __future__ import annotations

import asyncio

from services.decode.acceptance import AcceptanceLimits, AcceptanceWatch
from services.decode.attempts import Attempts
from services.decode.canary import Canary
from services.decode.metering import DecodeMetrics
from services.decode.peer import PeerTimes
from services.decode.peers import Peers
from services.decode.readiness import Readiness
from services.decode.servicer import DecodeServicer
from services.decode.settings import DecodeSettings
from services.discovery.registry import Registry, keep_watching
from services.pod import SHOW_DEATH_S, open_pod, stop_on_signals
from services.pod_metrics import served
from services.tracing import open_tracing
from sluice.rpc.channel import ChannelConfig
from sluice.rpc.server import RpcServer, ServerConfig
from sluice.rpc.tls import PeerRole
from sluice.telemetry.logging import get_logger
from sluice.types import Role
from sluice.v1 import decode_pb2_grpc

log = get_logger(__name__)
SERVICE = "sluice.v1.Decode"
LAYOUT = "sluice.layout"  # health: at least one prefill has agreed and its canary passed
_WATCH_EVERY_S = 1.0


async def serve(settings: DecodeSettings) -> None:
    """Run until SIGTERM or SIGINT, then drain: streams first, then what they still hold, the port last.

    Raises what a thread of the pod died of, so that whoever watches the process restarts it.
    """
    stopping = asyncio.Event()
    tls = settings.tls(PeerRole.DECODE)
    source = settings.source()
    async with (
        open_tracing("decode", settings.otlp_endpoint) as tracing,
        open_pod(settings, Role.DECODE) as pod,
    ):
        peers = Peers(
            pod.info.layout,
            pod.epoch,
            pod.endpoints,
            allow_missing_draft=settings.allow_missing_draft,
            times=PeerTimes(canary_every_s=settings.canary_every_s),
            channel=ChannelConfig(tls=tls),
        )
        acceptance = AcceptanceWatch(
            pod.info.layout.spec.steps > 0,
            AcceptanceLimits(collapse_below=settings.acceptance_alarm_tokens),
        )
        metrics = DecodeMetrics(acceptance)
        peers.on_refused = lambda refusal: metrics.refused(refusal.causes())
        attempts = Attempts(
            pod.engine,
            pod.memory,
            pod.sides,
            peers,
            pod.epoch,
            pod.faults,
            metrics,
            want_digests=settings.verify_digests,
        )
        canary = Canary(
            attempts, pod.info.layout, pod.vocab_size, metrics, settings.canary_floor_bytes_s
        )
        peers.proving.canary = canary.run
        readiness = Readiness(pod, peers, settings.max_quarantined_share)
        metrics.watch(pod, lambda: readiness.state.ready)
        metrics.watch_peers(pod, peers)
        servicer = DecodeServicer(
            pod.info,
            peers,
            attempts,
            pod.engine,
            readiness,
            canary,
            acceptance,
            tracing,
            max_model_tokens=settings.max_model_tokens,
            capacity=settings.max_running,
        )
        server = RpcServer(
            ServerConfig(settings.listen, tls=tls, health_listen=settings.health_listen),
            lambda grpc: decode_pb2_grpc.add_DecodeServicer_to_server(servicer, grpc),
            (SERVICE,),
            (LAYOUT,),
        )
        await server.start()
        registry = Registry()
        registry.listen(peers.follow)
        discover = asyncio.create_task(keep_watching(source, registry))
        watch = asyncio.create_task(_watch(peers, readiness, server, stopping))
        log.info("listening", address=server.address, epoch=pod.epoch)
        async with served(metrics.metrics, settings.metrics_listen, readiness.health):
            with stop_on_signals(stopping.set):
                await stopping.wait()
            watch.cancel()
            discover.cancel()
            readiness.draining = True
            await server.set_serving(SERVICE, False)
            await attempts.drain(settings.drain_s)
            await server.stop()
            await peers.close()
        pod.require_alive()


async def _watch(
    peers: Peers, readiness: Readiness, server: RpcServer, stopping: asyncio.Event
) -> None:
    """Keep health true: at once when a pairing changes, and every second for what nobody reports. Stop what
    is dead.
    """
    alive = True
    while True:
        state = readiness.refresh()
        await server.set_serving(SERVICE, state.ready)
        await server.set_serving(LAYOUT, state.paired)
        if alive and not state.alive:
            alive = False
            await server.set_serving("", False)
            asyncio.get_running_loop().call_later(SHOW_DEATH_S, stopping.set)
        await peers.changed(_WATCH_EVERY_S)
