"""Builds a batch's attention plans, one a layer kind, from the pools' geometry.

Shape legend: as in ``plan.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sluice.models.base import ForwardBatch
from sluice.models.deepseek_v4 import state
from sluice.models.deepseek_v4.attention import AttentionPlan, CompressedPlan, LayerBuffers
from sluice.models.deepseek_v4.config import DeepseekV4Config, LayerKind
from sluice.models.deepseek_v4.plan import EntryPlan, Segments, TailPlan, WindowPlan
from sluice.models.layers.rope import rope_frequencies, rotation_at
from sluice.pools.base import StateMemory

_HISTORY = {LayerKind.CSA: state.C4, LayerKind.HCA: state.C128}
_TAIL = {LayerKind.CSA: state.C4_TAIL, LayerKind.HCA: state.C128_TAIL}


class Planner:
    """Index tensors and rotations for the layers of one model. Holds the frequency tables only."""

    def __init__(self, config: DeepseekV4Config, device: torch.device) -> None:
        self._config = config
        self._frequencies = {
            kind: rope_frequencies(config.rope_of(kind), device) for kind in LayerKind
        }

    def target(self, batch: ForwardBatch, memory: StateMemory) -> dict[LayerKind, AttentionPlan]:
        """A plan for each kind of layer that the target has."""
        segments = Segments.of(batch)
        window = WindowPlan.of(segments, memory.component(memory.window_name(state.WINDOW)))
        return {
            kind: self._plan(kind, batch, segments, window, memory)
            for kind in LayerKind
            if self._config.layers_of(kind)
        }

    def draft(self, batch: ForwardBatch, memory: StateMemory) -> AttentionPlan:
        """The plan of the NextN layer; rows below ``draft_valid_from`` never arrived."""
        valid_from_S = torch.tensor(
            [segment.tables.draft_valid_from for segment in batch.segments],
            device=batch.positions_T.device,
        )
        component = memory.component(memory.window_name(state.DRAFT_WINDOW))
        segments = Segments.of(batch)
        window = WindowPlan.of(segments, component, valid_from_S)
        return self._plan(LayerKind.WINDOW, batch, segments, window, memory)

    def _plan(
        self,
        kind: LayerKind,
        batch: ForwardBatch,
        segments: Segments,
        window: WindowPlan,
        memory: StateMemory,
    ) -> AttentionPlan:
        compressed = None
        if kind is not LayerKind.WINDOW:
            compressed = self._compressed(kind, batch, segments, memory)
        return AttentionPlan(
            window=window,
            rotation=rotation_at(self._frequencies[kind], segments.position_T),
            compressed=compressed,
            index_topk=self._config.index_topk,
            norm_eps=self._config.norm_eps,
        )

    def _compressed(
        self, kind: LayerKind, batch: ForwardBatch, segments: Segments, memory: StateMemory
    ) -> CompressedPlan:
        history = memory.component(_HISTORY[kind])
        tail = TailPlan.of(segments, memory.component(_TAIL[kind]))
        return CompressedPlan(
            tail=tail,
            entries=EntryPlan.of(batch, segments, history, tail),
            closing_rotation=rotation_at(
                self._frequencies[kind], tail.ordinal_M * history.tokens_per_row
            ),
        )


def target_buffers(config: DeepseekV4Config, layer: int, memory: StateMemory) -> LayerBuffers:
    """The pool rows of one target layer.

    A CSA layer's indexer has the geometry of its main compressor, so one plan serves both.
    """
    window = memory.buffer(memory.window_name(state.WINDOW), layer)
    kind = config.layer_kinds[layer]
    if kind is LayerKind.WINDOW:
        return LayerBuffers(window)
    entries, tail = memory.buffer(_HISTORY[kind], layer), memory.buffer(_TAIL[kind], layer)
    if kind is LayerKind.HCA:
        return LayerBuffers(window, entries, tail)
    return LayerBuffers(
        window,
        entries,
        tail,
        index_keys=memory.buffer(state.C4_INDEXER, layer),
        index_tail=memory.buffer(state.C4_INDEXER_TAIL, layer),
    )


def draft_buffers(config: DeepseekV4Config, memory: StateMemory) -> LayerBuffers:
    """The pool rows of the NextN layer."""
    window: Tensor = memory.buffer(memory.window_name(state.DRAFT_WINDOW), config.num_layers)
    return LayerBuffers(window)
