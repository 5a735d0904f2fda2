"""What the plane contracts share: planes of one kind that reach each other, arenas, row writes."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sluice.transfer.loopback import LoopbackFabric, LoopbackPlane
from sluice.transfer.nixl import NixlPlane
from sluice.transfer.plane import Endpoint, Handle, HandleState, Plane, Polled, Write
from tests.contract.target_process import ROW_BYTES, regions_of

WAIT_S = 15.0
NUM_ROWS = 256
SIZE = NUM_ROWS * ROW_BYTES
ROOT = Path(__file__).parents[2]


class Planes:
    """Makes planes of one kind that can reach each other, and closes them after the test."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._fabric = LoopbackFabric()
        self._opened: list[Plane] = []

    def make(self, role: str) -> Plane:
        name = f"{role}-{uuid.uuid4().hex[:8]}"
        plane: Plane
        if self.kind == "loopback":
            plane = LoopbackPlane(self._fabric, name)
        else:
            plane = NixlPlane(name, initiator=role == "prefill")
        self._opened.append(plane)
        return plane

    def open(self, role: str) -> tuple[Plane, Tensor, Endpoint]:
        plane, arena = self.make(role), new_arena(random_bytes=role == "prefill")
        return plane, arena, plane.open(arena, regions_of(arena))

    def close(self) -> None:
        for plane in self._opened:
            plane.close()


def new_arena(*, random_bytes: bool) -> Tensor:
    if random_bytes:
        return torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    return torch.zeros(SIZE, dtype=torch.uint8)


def row_writes(source: Tensor, target_base: int, pairs: Sequence[tuple[int, int]]) -> list[Write]:
    return [
        Write(source.data_ptr() + s * ROW_BYTES, target_base + t * ROW_BYTES, ROW_BYTES)
        for s, t in pairs
    ]


def settle_handle(plane: Plane, handle: Handle, timeout_s: float = WAIT_S) -> Polled:
    deadline = time.monotonic() + timeout_s
    while True:
        polled = plane.poll(handle)
        if polled.state is not HandleState.POSTED or time.monotonic() > deadline:
            return polled
        time.sleep(0.0005)


def expected_rows(source: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    out = torch.zeros(SIZE, dtype=torch.uint8).view(-1, ROW_BYTES)
    for s, t in pairs:
        out[t] = source.view(-1, ROW_BYTES)[s]
    return out.view(-1)


def scattered(count: int) -> list[tuple[int, int]]:
    dice = random.Random(7)
    return list(
        zip(dice.sample(range(NUM_ROWS), count), dice.sample(range(NUM_ROWS), count), strict=True)
    )
