"""A Llama or Qwen3 model as the engine sees it.

Shape legend: T tokens, R chosen rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.models.base import ForwardBatch, ModelInfo
from sluice.models.capture import HiddenCapture
from sluice.models.layers.norm import rms_norm
from sluice.models.layers.tokens import TokenTable
from sluice.models.llama.attention import attention
from sluice.models.llama.config import LlamaConfig
from sluice.models.llama.plan import AttentionPlan
from sluice.models.llama.rope import rope_frequencies
from sluice.models.llama.state import KV, target_state
from sluice.models.llama.weights import LayerWeights, LlamaWeights
from sluice.parallel.group import SINGLE, Parallel
from sluice.pools.base import BufferSpec, StateMemory
from sluice.pools.state_rows import state_rows


class LlamaTarget:
    """``models.capture.ReadableTarget``. Hidden states are ``[T, D]``, before the final norm.

    Ranks that share the model hold the same residual stream and each add their part of a sublayer to it.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: LlamaWeights,
        info: ModelInfo,
        parallel: Parallel = SINGLE,
    ) -> None:
        self._config = config
        self._local = config.of_rank(parallel.size)
        self._parallel = parallel
        self._weights = weights
        self._info = info
        self._freq_F = rope_frequencies(config.rope, weights.embed.device)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def config(self) -> LlamaConfig:
        return self._config

    @property
    def num_layers(self) -> int:
        return self._config.num_layers

    @property
    def embedding(self) -> TokenTable:
        return self._weights.embed

    @property
    def vocabulary(self) -> TokenTable:
        return self._weights.vocabulary

    def state_needs(self, kv_dtype: str) -> tuple[BufferSpec, ...]:
        return target_state(self._config, kv_dtype, self._parallel.size)

    @torch.no_grad()
    def forward(
        self, batch: ForwardBatch, memory: StateMemory, capture: HiddenCapture | None = None
    ) -> Tensor:
        """Residual stream after the last layer; every layer's rows for the batch are written."""
        config, shared = self._local, self._parallel.all_reduce
        plan = AttentionPlan.of(batch, memory.component(KV), self._freq_F, config.group_size)
        x_TD = self._weights.embed.embed(batch.ids_T)
        for layer, weights in enumerate(self._weights.layers):
            normed_TD = rms_norm(x_TD, weights.attn_norm, config.norm_eps)
            rows = state_rows(memory, KV, layer)
            x_TD = x_TD + shared(attention(normed_TD, weights, config, plan, rows))
            x_TD = x_TD + shared(mlp(rms_norm(x_TD, weights.mlp_norm, config.norm_eps), weights))
            if capture is not None:
                capture.after_layer(layer, x_TD)
        return x_TD

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """``[R, D]`` -> float32 ``[R, V]``."""
        normed_RD = rms_norm(hidden, self._weights.norm, self._config.norm_eps)
        return self._weights.vocabulary.logits(normed_RD).float()


def mlp(x_TD: Tensor, weights: LayerWeights) -> Tensor:
    """SwiGLU (Shazeer 2020): ``w2 (silu(gate) * up)``."""
    gate_TI, up_TI = F.linear(x_TD, weights.w13).chunk(2, dim=-1)
    return F.linear(F.silu(gate_TI) * up_TI, weights.w2)
