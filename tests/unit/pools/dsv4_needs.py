"""DeepSeek-V4-like state needs in small sizes, and ways to write and read rows of a memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sluice.config import PoolConfig, PoolMode
from sluice.layout.component import Component, Coverage, Kind, Owner
from sluice.layout.span import runs_of
from sluice.pools.base import BufferSpec, RequestTables
from sluice.pools.memory import Memory, build_memory

WINDOW = 16
PAGE_TOKENS = 128
VERIFY_TOKENS = 4
LATENT = 3  # odd, so that a wrong stride shows


def target_needs(window: int = WINDOW) -> tuple[BufferSpec, ...]:
    """Layers 0 and 1 are window only, 2 and 4 have ratio 4, 3 has ratio 128."""

    def spec(
        name: str,
        kind: Kind,
        coverage: Coverage,
        tokens: tuple[int, int],
        layers: tuple[int, ...],
        width: int,
    ) -> BufferSpec:
        return BufferSpec(
            f"target.{name}",
            Owner.TARGET,
            kind,
            coverage,
            tokens[0],
            tokens[1],
            layers,
            "float32",
            (width,),
        )

    return (
        spec("c4", Kind.C4, Coverage.HISTORY, (4, 0), (2, 4), LATENT),
        spec("c4_indexer", Kind.C4_INDEXER, Coverage.HISTORY, (4, 0), (2, 4), 2),
        spec("c128", Kind.C128, Coverage.HISTORY, (128, 0), (3,), LATENT),
        spec("swa", Kind.SWA, Coverage.WINDOW, (1, window), (0, 1, 2, 3, 4), LATENT),
        spec("c4_tail", Kind.C4_TAIL, Coverage.OVERLAP_TAIL, (1, 4), (2, 4), 4 * LATENT),
        spec("c4_indexer_tail", Kind.C4_INDEXER_TAIL, Coverage.OVERLAP_TAIL, (1, 4), (2, 4), 8),
        spec("c128_tail", Kind.C128_TAIL, Coverage.OPEN_BLOCK, (1, 128), (3,), 2 * LATENT),
    )


def draft_needs(window: int = WINDOW) -> tuple[BufferSpec, ...]:
    """One NextN layer: its window, and its streams of the last committed position."""
    owner = Owner.DRAFT
    return (
        BufferSpec(
            "draft.swa", owner, Kind.SWA, Coverage.WINDOW, 1, window, (5,), "float32", (LATENT,)
        ),
        BufferSpec(
            "draft.hidden", owner, Kind.HIDDEN, Coverage.LAST, 1, 0, (5,), "bfloat16", (2, 5)
        ),
    )


def needs(window: int = WINDOW) -> tuple[BufferSpec, ...]:
    return (*target_needs(window), *draft_needs(window))


def config(
    mode: PoolMode,
    *,
    num_pages: int = 24,
    num_window_pages: int = 10,
    num_slots: int = 4,
    page_tokens: int = PAGE_TOKENS,
    fill: str | None = None,
) -> PoolConfig:
    return PoolConfig(
        mode=mode,
        page_tokens=page_tokens,
        num_pages=num_pages,
        num_window_pages=num_window_pages,
        num_slots=num_slots,
        fill=fill,
    )


def memory(
    mode: PoolMode,
    *,
    window: int = WINDOW,
    num_pages: int = 24,
    num_window_pages: int = 10,
    num_slots: int = 4,
    fill: str | None = None,
) -> Memory:
    settings = config(
        mode,
        num_pages=num_pages,
        num_window_pages=num_window_pages,
        num_slots=num_slots,
        fill=fill,
    )
    return build_memory(needs(window), settings, VERIFY_TOKENS)


def physical(component: Component, tables: RequestTables, ordinals: range) -> list[int]:
    """Physical rows of logical rows; raises ``SpanMismatch`` when one isn't mapped."""
    runs = runs_of(component, tables, ordinals)
    return [row for run in runs for row in range(run.first, run.first + run.count)]


def write_rows(
    memory: Memory, component: Component, rows: Sequence[int], values: Sequence[float]
) -> None:
    """Every element of row ``rows[i]`` becomes ``values[i]``, in all layers."""
    for entry in component.entries:
        buffer = memory.buffer(component.name, entry.layer_id)
        flat = buffer.view(buffer.shape[0], -1)
        flat[list(rows)] = torch.tensor(list(values), dtype=buffer.dtype)[:, None]


def read_rows(memory: Memory, component: Component, rows: Sequence[int]) -> list[list[float]]:
    """One list a layer: the rows' values. Asserts that a row holds one value throughout."""
    out: list[list[float]] = []
    for entry in component.entries:
        buffer = memory.buffer(component.name, entry.layer_id)
        flat = buffer.view(buffer.shape[0], -1)[list(rows)].to(torch.float32)
        assert torch.equal(flat, flat[:, :1].expand_as(flat)), f"{component.name}: a torn row"
        out.append([float(value) for value in flat[:, 0]])
    return out
