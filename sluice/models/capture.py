"""What a draft may read of its target: residual streams between layers, and the token tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sluice.models.base import ForwardBatch, TargetModel
from sluice.models.layers.tokens import TokenTable
from sluice.pools.base import StateMemory


class HiddenCapture:
    """Collects the residual stream after chosen layers during one target forward.

    Layers are 0-based; the stream after layer i is the input of layer i + 1, so that of the last
    layer comes before the final norm. One object serves one forward: a second stream of the same
    layer is a bug, and so is reading before all layers have been seen.

    Shape legend: T tokens, C chosen layers, D the target's hidden size.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)
        self._seen: dict[int, Tensor] = {}

    def after_layer(self, layer: int, x_TD: Tensor) -> None:
        """The target calls this after every layer; streams nobody asked for are not kept."""
        if layer in self._layers:
            assert layer not in self._seen, f"layer {layer} was captured twice in one forward"
            self._seen[layer] = x_TD

    def hidden(self) -> Tensor:
        """``[T, C * D]``, layers in the order they were asked for."""
        missing = [layer for layer in self._layers if layer not in self._seen]
        assert not missing, f"the target never showed layers {missing}"
        return torch.cat([self._seen[layer] for layer in self._layers], dim=-1)


class ReadableTarget(TargetModel, Protocol):
    """A target that shows its residual streams and shares its token tables with a draft."""

    @property
    def num_layers(self) -> int: ...

    @property
    def embedding(self) -> TokenTable:
        """Token embeddings, ``[V, D]``."""
        ...

    @property
    def vocabulary(self) -> TokenTable:
        """The output head's rows, ``[V, D]``."""
        ...

    def forward(
        self, batch: ForwardBatch, memory: StateMemory, capture: HiddenCapture | None = None
    ) -> Tensor:
        """As in ``TargetModel``; calls ``capture.after_layer`` after each layer."""
        ...
