"""A worker over a loopback fabric that tests can hold, kill and watch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.pools.base import Region
from sluice.transfer.loopback import LoopbackFabric, LoopbackPlane
from sluice.transfer.plane import Endpoint, Handle, Link, Polled, Write
from sluice.transfer.worker import TransferWorker, WorkerConfig

KB = 1024
WAIT_S = 10.0


def new_arena(size: int = 64 * KB, fill: int | None = None) -> Tensor:
    if fill is None:
        return torch.randint(0, 255, (size,), dtype=torch.uint8)
    return torch.full((size,), fill, dtype=torch.uint8)


def regions_of_arena(arena: Tensor) -> tuple[Region, ...]:
    return (Region("c", 0, arena.data_ptr(), arena.numel() // KB, KB),)


class Spy(LoopbackPlane):
    """Remembers which thread called, the order of peers posted to, and how many groups are in flight."""

    def __init__(self, fabric: LoopbackFabric) -> None:
        super().__init__(fabric, "prefill")
        self.threads: set[str] = set()
        self.posts: list[str] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.fail_poll: Exception | None = None
        self.polls = 0

    def post(self, link: Link, writes: Sequence[Write]) -> Handle:  # type: ignore[override]
        self.threads.add(threading.current_thread().name)
        handle = super().post(link, writes)
        self.posts.append(link.endpoint.agent_name)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return handle

    def poll(self, handle: Handle) -> Polled:
        self.threads.add(threading.current_thread().name)
        self.polls += 1
        if self.fail_poll is not None:
            raise self.fail_poll
        return super().poll(handle)

    def release(self, handle: Handle) -> None:
        super().release(handle)
        self.in_flight -= 1


@dataclass
class Rig:
    fabric: LoopbackFabric
    plane: Spy
    worker: TransferWorker
    source: Tensor
    peers: dict[str, tuple[LoopbackPlane, Tensor, Endpoint]]

    def peer(self, name: str) -> tuple[Tensor, Link]:
        arena = new_arena(fill=0)
        plane = LoopbackPlane(self.fabric, name)
        endpoint = plane.open(arena, regions_of_arena(arena))
        self.peers[name] = plane, arena, endpoint
        return arena, self.worker.connect(endpoint).result(WAIT_S)

    def writes(self, target: Tensor, rows: range = range(64)) -> list[Write]:
        """One 1 KB row each, never contiguous on both sides."""
        last = target.numel() // KB - 1
        return [
            Write(self.source.data_ptr() + r * KB, target.data_ptr() + (last - r) * KB, KB)
            for r in rows
        ]

    def expected(self, rows: range = range(64)) -> Tensor:
        out = torch.zeros_like(self.source).view(-1, KB)
        for row in rows:
            out[len(out) - 1 - row] = self.source.view(-1, KB)[row]
        return out.view(-1)


MakeRig = Callable[..., Rig]


@contextmanager
def started_rigs() -> Iterator[MakeRig]:
    """Yields ``make(config, before_post)``; groups of 4 KB unless said. All are let go and closed at the end."""
    rigs: list[Rig] = []

    def make(
        config: WorkerConfig | None = None, before_post: Callable[[int], None] | None = None
    ) -> Rig:
        fabric = LoopbackFabric()
        plane = Spy(fabric)
        worker = TransferWorker(
            plane, config or WorkerConfig(group_bytes=4 * KB), before_post=before_post
        )
        source = new_arena()
        worker.start(source, regions_of_arena(source))
        rigs.append(Rig(fabric, plane, worker, source, {}))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.fabric.resume()
        rig.worker.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "condition never came true"
        time.sleep(0.002)
