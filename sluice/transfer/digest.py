"""Digest of one component's rows: equal on both pods exactly when every row arrived, whatever their page numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sluice.layout.component import Component
from sluice.layout.span import Run, count_rows

DIGEST_BYTES = 16


class Buffers(Protocol):
    """What of ``pools.base.StateMemory`` a digest needs."""

    def buffer(self, component: str, layer_id: int) -> Tensor: ...


def digest_rows(memory: Buffers, component: Component, runs: Sequence[Run]) -> bytes:
    """BLAKE2b-16 over the rows of ``runs`` in logical order, entry after entry.

    Name, row count and row size are part of it, so that an empty or shortened span never equals another one.
    Rows on a device are copied to the host first. About 1 s for each GB and core (docs/performance.md); hashing
    releases the GIL, so call it from a thread that may take its time.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(f"{component.name}:{count_rows(runs)}".encode())
    for entry in component.entries:
        digest.update(f"|{entry.layer_id}:{entry.row_bytes}|".encode())
        buffer = memory.buffer(component.name, entry.layer_id)
        for run in runs:
            digest.update(_host_bytes(buffer[run.first : run.first + run.count]))
    return digest.digest()


def _host_bytes(rows: Tensor) -> memoryview:
    """The rows' bytes; no copy for contiguous CPU rows."""
    flat = rows.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data
