"""Layouts of DeepSeek-V4-shaped models, built from config numbers alone (no torch, no pools)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from sluice.layout.component import Component, Coverage, Entry, Kind, Owner, Space
from sluice.layout.layout import Geometry, Layout, ModelIdentity, Parallelism, SpecIdentity

_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Dims:
    """The config numbers that decide what state there is."""

    ratios: tuple[int, ...]
    hidden: int
    streams: int = 4
    latent: int = 512
    index: int = 128
    window: int = 128


FLASH = Dims(ratios=(0, 0, *(4, 128) * 20, 4), hidden=4096)
PRO = Dims(ratios=(128, 128, *(4, 128) * 29, 4), hidden=7168)
SMALL = Dims(ratios=(0, 4, 128, 4), hidden=64, latent=32, index=16)


@dataclass(frozen=True)
class Pod:
    """What a pod is configured with."""

    role: str = "decode"
    mode: str = "paged"
    page_tokens: int = 128
    kv_dtype: str = "float32"
    steps: int = 3  # 0: no draft
    num_pages: int = 65
    num_window_pages: int = 33
    num_slots: int = 17


def layout_of(dims: Dims, pod: Pod) -> Layout:
    verify = pod.steps + 1
    unified = pod.mode == "unified"
    return Layout(
        role=pod.role,
        model=ModelIdentity("DeepseekV4ForCausalLM", "c0ffee", "beef", "f00d"),
        geometry=Geometry(
            page_tokens=pod.page_tokens,
            window_tokens=dims.window,
            compression_ratios=dims.ratios,
            pool_mode=pod.mode,
            ring_rows=dims.window + verify - 1 if unified else 0,
            kv_dtype=pod.kv_dtype,
            byte_layout="rows",
        ),
        parallelism=Parallelism(),
        spec=SpecIdentity("mtp", pod.steps, verify, "d4af7", (0,))
        if pod.steps
        else SpecIdentity("none", 0, 1, "", ()),
        components=(*_target(dims, pod, verify), *(_draft(dims, pod, verify) if pod.steps else ())),
    )


def pair(dims: Dims = SMALL, **changes: Any) -> tuple[Layout, Layout]:
    """A prefill and a decode layout that agree."""
    pod = replace(Pod(), **changes)
    return layout_of(dims, replace(pod, role="prefill")), layout_of(dims, pod)


def _target(dims: Dims, pod: Pod, verify: int) -> tuple[Component, ...]:
    csa = tuple(i for i, ratio in enumerate(dims.ratios) if ratio == 4)
    hca = tuple(i for i, ratio in enumerate(dims.ratios) if ratio == 128)
    tail_rows = 1 << (2 * 4 + verify - 2).bit_length()
    tail_space = Space.STATE_ROW if pod.mode == "unified" else Space.WINDOW_PAGE
    tail_items = pod.num_slots if pod.mode == "unified" else pod.num_window_pages

    def history(name: str, kind: Kind, ratio: int, width: int) -> Component:
        layers = csa if ratio == 4 else hca
        return Component(
            name,
            Owner.TARGET,
            kind,
            Space.PAGE,
            Coverage.HISTORY,
            ratio,
            pod.page_tokens // ratio,
            0,
            pod.num_pages,
            _entries(layers, pod.kv_dtype, (width,)),
        )

    def overlap(name: str, kind: Kind, width: int) -> Component:
        return Component(
            name,
            Owner.TARGET,
            kind,
            tail_space,
            Coverage.OVERLAP_TAIL,
            1,
            tail_rows,
            4,
            tail_items,
            _entries(csa, "float32", (4 * width,)),
        )

    return (
        history("target.c4", Kind.C4, 4, dims.latent),
        history("target.c4_indexer", Kind.C4_INDEXER, 4, dims.index),
        history("target.c128", Kind.C128, 128, dims.latent),
        _window(Owner.TARGET, tuple(range(len(dims.ratios))), dims, pod, verify),
        overlap("target.c4_tail", Kind.C4_TAIL, dims.latent),
        overlap("target.c4_indexer_tail", Kind.C4_INDEXER_TAIL, dims.index),
        Component(
            "target.c128_tail",
            Owner.TARGET,
            Kind.C128_TAIL,
            Space.STATE_ROW,
            Coverage.OPEN_BLOCK,
            1,
            128 + verify - 1,
            128,
            pod.num_slots,
            _entries(hca, "float32", (2 * dims.latent,)),
        ),
    )


def _draft(dims: Dims, pod: Pod, verify: int) -> tuple[Component, ...]:
    return (
        _window(Owner.DRAFT, (0,), dims, pod, verify),
        Component(
            "draft.hidden",
            Owner.DRAFT,
            Kind.HIDDEN,
            Space.REQUEST_SLOT,
            Coverage.LAST,
            1,
            1,
            0,
            pod.num_slots,
            _entries((0,), pod.kv_dtype, (dims.streams, dims.hidden)),
        ),
    )


def _window(owner: Owner, layers: tuple[int, ...], dims: Dims, pod: Pod, verify: int) -> Component:
    unified = pod.mode == "unified"
    return Component(
        f"{owner.value}.swa" + ("_ring" if unified else ""),
        owner,
        Kind.SWA_RING if unified else Kind.SWA,
        Space.RING_ROW if unified else Space.WINDOW_PAGE,
        Coverage.WINDOW,
        1,
        dims.window + verify - 1 if unified else pod.page_tokens,
        dims.window,
        pod.num_slots if unified else pod.num_window_pages,
        _entries(layers, pod.kv_dtype, (dims.latent,)),
    )


def _entries(layers: tuple[int, ...], dtype: str, shape: tuple[int, ...]) -> tuple[Entry, ...]:
    return tuple(Entry(i, dtype, shape, math.prod(shape) * _BYTES[dtype]) for i in layers)


def with_component(layout: Layout, name: str, /, **changes: Any) -> Layout:
    """``layout`` with some fields of one component replaced."""
    return replace(
        layout,
        components=tuple(replace(c, **changes) if c.name == name else c for c in layout.components),
    )


def with_entry(layout: Layout, name: str, index: int, /, **changes: Any) -> Layout:
    """``layout`` with some fields of one entry replaced."""
    entries = list(layout.component(name).entries)
    entries[index] = replace(entries[index], **changes)
    return with_component(layout, name, entries=tuple(entries))
