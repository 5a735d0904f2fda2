"""Metrics that prefill and decode share, and the HTTP port of metrics and health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.environment import split_address
from services.pod import Pod
from sluice.errors import ConfigError
from sluice.rpc.messages import PoolStatus, pool_statuses
from sluice.telemetry.catalogue import (
    ITEM_STATES,
    POD_ATTEMPTS,
    POD_COMPONENT_BYTES,
    POD_INFO,
    POD_ITEMS,
    POD_QUEUED,
    POD_READY,
    POD_REFUSALS,
    POD_RUNNING,
    POD_STEPS,
    POD_TRANSFERRED,
    POD_WAITING,
)
from sluice.telemetry.logging import get_logger
from sluice.telemetry.metrics import BoundedLabel, Metrics, MetricsServer, Sample
from sluice.transfer.messages import Moved
from sluice.types import Role

log = get_logger(__name__)
_LOOP_ANSWERS_S = 2.0
_HUNG = f"the event loop gave no answer within {_LOOP_ANSWERS_S:.0f} s"


@dataclass(frozen=True)
class Health:
    """Why the pod isn't alive, and why it isn't ready; empty: it is."""

    dead: str
    unready: str


class PodMetrics:
    """Counted on the event loop as attempts end; the rest is read from snapshots when somebody scrapes."""

    def __init__(self, role: Role) -> None:
        self.role = role.value
        self.metrics = Metrics()
        self._attempts = self.metrics.counter(POD_ATTEMPTS)
        self._transferred = self.metrics.counter(POD_TRANSFERRED)
        self._refusals = self.metrics.counter(POD_REFUSALS)
        self._field = BoundedLabel()

    def attempt_ended(self, outcome: str) -> None:
        self._attempts.labels(self.role, outcome).inc()

    def crossed(self, components: Iterable[Moved]) -> None:
        for moved in components:
            self._transferred.labels(self.role, moved.component).inc(moved.num_bytes)

    def refused(self, fields: Iterable[str]) -> None:
        """``fields``: paths of the differences that caused a refusal."""
        for field in fields:
            self._refusals.labels(self.role, self._field(field)).inc()

    def watch(self, pod: Pod, ready: Callable[[], bool]) -> None:
        """Read engine and memory of this pod from now on."""

        def read() -> Iterator[Sample]:
            stats, role = pod.engine.latest_stats, (self.role,)
            layout = pod.info.layout
            info = (self.role, pod.epoch, pod.info.fingerprint, layout.model.architecture)
            yield Sample(POD_INFO, 1, info)
            yield Sample(POD_READY, ready(), role)
            yield Sample(POD_QUEUED, stats.queued, role)
            yield Sample(POD_RUNNING, stats.running, role)
            yield Sample(POD_WAITING, stats.waiting, role)
            yield Sample(POD_STEPS, stats.steps, role)
            for pool in pool_statuses(stats.occupancy, layout):
                yield from self._pool(pool)

        lazy = (
            POD_INFO,
            POD_READY,
            POD_QUEUED,
            POD_RUNNING,
            POD_WAITING,
            POD_STEPS,
            POD_ITEMS,
            POD_COMPONENT_BYTES,
        )
        self.metrics.lazily(lazy, read)

    def _pool(self, pool: PoolStatus) -> Iterator[Sample]:
        counts = (pool.free, pool.held, pool.quarantined, pool.cached)
        for state, count in zip(ITEM_STATES, counts, strict=True):
            yield Sample(POD_ITEMS, count, (self.role, pool.space, state))
        for component in pool.components:
            yield Sample(POD_COMPONENT_BYTES, component.num_bytes, (self.role, component.name))


@asynccontextmanager
async def served(
    metrics: Metrics, listen: str, health: Callable[[], Health]
) -> AsyncIterator[None]:
    """Serve ``GET /metrics``, ``/live`` and ``/ready`` on ``listen`` (host:port; empty = don't).

    ``health`` is called on the event loop; one that hangs is neither alive nor ready. Raises ``ConfigError``.
    """
    if not listen:
        yield
        return
    host, port = split_address(listen)
    loop = asyncio.get_running_loop()

    def ask() -> Health:
        return _ask(loop, health)

    checks = {"/live": lambda: ask().dead, "/ready": lambda: ask().unready}
    try:
        server = MetricsServer(metrics, host, port, checks)
    except OSError as error:
        raise ConfigError(
            f"can't serve metrics on {listen}: {error}",
            stage="start",
            remedy="choose another metrics_listen, or leave it empty",
        ) from error
    log.info("metrics_listening", address=server.address)
    try:
        yield
    finally:
        await asyncio.to_thread(server.close)


def _ask(loop: asyncio.AbstractEventLoop, health: Callable[[], Health]) -> Health:
    """From another thread."""

    async def on_loop() -> Health:
        return health()

    answer = asyncio.run_coroutine_threadsafe(on_loop(), loop)
    try:
        return answer.result(_LOOP_ANSWERS_S)
    except TimeoutError:
        answer.cancel()
        return Health(_HUNG, _HUNG)
