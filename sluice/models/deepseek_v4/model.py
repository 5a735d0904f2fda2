"""The DeepSeek-V4 target and its NextN draft as the engine sees them.

Shape legend: T tokens, R chosen rows, N streams, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.models.base import ForwardBatch, ModelInfo
from sluice.models.deepseek_v4.block import block, head_logits
from sluice.models.deepseek_v4.config import DeepseekV4Config
from sluice.models.deepseek_v4.planner import Planner, draft_buffers, target_buffers
from sluice.models.deepseek_v4.state import draft_state, target_state
from sluice.models.deepseek_v4.weights import NextnWeights, TargetWeights
from sluice.models.layers.norm import rms_norm
from sluice.parallel.group import SINGLE, Parallel
from sluice.pools.base import BufferSpec, StateMemory


class DeepseekV4Target:
    """``models.base.TargetModel``. Hidden states are the pre-head streams ``[T, N, D]``."""

    def __init__(
        self,
        config: DeepseekV4Config,
        weights: TargetWeights,
        info: ModelInfo,
        parallel: Parallel = SINGLE,
    ) -> None:
        self._config = config
        self._parallel = parallel
        self._weights = weights
        self._info = info
        self._planner = Planner(config, weights.embed.device)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def config(self) -> DeepseekV4Config:
        return self._config

    def state_needs(self, kv_dtype: str) -> tuple[BufferSpec, ...]:
        return target_state(self._config, kv_dtype)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, memory: StateMemory) -> Tensor:
        """Streams after the last layer; every layer's state rows for the batch are written."""
        plans = self._planner.target(batch, memory)
        embedded_TD = self._weights.embed.embed(batch.ids_T)
        streams_TND = embedded_TD.unsqueeze(1).repeat(1, self._config.hyper.num_streams, 1)
        for layer, weights in enumerate(self._weights.layers):
            plan = plans[self._config.layer_kinds[layer]]
            buffers = target_buffers(self._config, layer, memory)
            streams_TND = block(
                streams_TND, batch.ids_T, weights, self._config, plan, buffers, self._parallel
            )
        return streams_TND

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """``[R, N, D]`` -> float32 ``[R, V]``."""
        return head_logits(hidden, self._weights.head, self._config)


class DeepseekV4Nextn:
    """``models.base.DraftModel``: the NextN layer, which guesses token t + 2 from row t.

    Row t combines the target's streams (or, when chaining, its own) at t with the token at t + 1.
    """

    def __init__(
        self, config: DeepseekV4Config, weights: NextnWeights, parallel: Parallel = SINGLE
    ) -> None:
        self._config = config
        self._parallel = parallel
        self._weights = weights
        self._planner = Planner(config, weights.embed.device)

    def state_needs(self, kv_dtype: str) -> tuple[BufferSpec, ...]:
        return draft_state(self._config, kv_dtype)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, hidden: Tensor, memory: StateMemory) -> Tensor:
        """The draft's streams ``[T, N, D]``; ``batch.ids_T[i]`` is the token after row i's position."""
        x_TND = glue(hidden, batch.ids_T, self._weights, self._config)
        plan = self._planner.draft(batch, memory)
        buffers = draft_buffers(self._config, memory)
        return block(
            x_TND, batch.ids_T, self._weights.block, self._config, plan, buffers, self._parallel
        )

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """``[R, N, D]`` -> float32 ``[R, V]``, through the draft's own collapse and norm."""
        return head_logits(hidden, self._weights.head, self._config)


def glue(
    streams_TND: Tensor, next_ids_T: Tensor, weights: NextnWeights, config: DeepseekV4Config
) -> Tensor:
    """The NextN block's input: each normed stream projected, plus the projected next token."""
    embedded_TD = rms_norm(weights.embed.embed(next_ids_T), weights.enorm, config.norm_eps)
    streams_TND = rms_norm(streams_TND.to(weights.embed.dtype), weights.hnorm, config.norm_eps)
    return F.linear(embedded_TD, weights.e_proj).unsqueeze(1) + F.linear(
        streams_TND, weights.h_proj
    )
