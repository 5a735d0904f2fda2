"""A decode pod's memory in a process of its own, for test_plane: opens a NIXL target and obeys lines on stdin.

Prints its endpoint as one JSON line. ``bytes`` prints the arena's SHA-256, ``exit`` or end of input ends it.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import logging
import sys
from typing import TYPE_CHECKING, cast

import numpy as np

from sluice.pools.base import Region
from sluice.transfer.nixl import NixlPlane
from sluice.transfer.plane import Endpoint

if TYPE_CHECKING:
    from torch import Tensor

ROW_BYTES = 4096


class HostArena:
    """As much of a uint8 tensor as a plane needs. Importing torch would cost each test process seconds."""

    is_cuda = False

    def __init__(self, num_bytes: int) -> None:
        self.bytes = np.zeros(num_bytes, dtype=np.uint8)

    def data_ptr(self) -> int:
        return int(self.bytes.ctypes.data)

    def numel(self) -> int:
        return self.bytes.size

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True


def regions_of(arena: Tensor) -> tuple[Region, ...]:
    return (Region("c", 0, arena.data_ptr(), arena.numel() // ROW_BYTES, ROW_BYTES),)


def endpoint_to_json(endpoint: Endpoint) -> str:
    plain = dataclasses.asdict(endpoint)
    plain["metadata"] = base64.b64encode(endpoint.metadata).decode()
    return json.dumps(plain)


def endpoint_from_json(line: str) -> Endpoint:
    plain = json.loads(line)
    plain["metadata"] = base64.b64decode(plain["metadata"])
    plain["regions"] = tuple(Region(**region) for region in plain["regions"])
    return Endpoint(**plain)


def main(agent_name: str, num_bytes: int) -> None:
    host = HostArena(num_bytes)
    arena = cast("Tensor", host)
    plane = NixlPlane(agent_name, initiator=False)
    print(endpoint_to_json(plane.open(arena, regions_of(arena))), flush=True)
    assert logging.raiseExceptions, "the wheel's import must not change logging for this process"
    for line in sys.stdin:
        if line.strip() == "exit":
            break
        print(hashlib.sha256(host.bytes.data).hexdigest(), flush=True)
    plane.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
