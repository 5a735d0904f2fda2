"""The DSPARK draft: the target's hidden states become its context, and one forward drafts a block.

Shape legend: T tokens, B blocks, N rows a block, S drafts a block, D the draft's hidden size, E the
target's, C captured layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.errors import ConfigError
from sluice.models.base import ForwardBatch
from sluice.models.capture import ReadableTarget
from sluice.models.dspark.attention import BlockPlan, block_attention, context_kv
from sluice.models.dspark.config import DSparkConfig
from sluice.models.dspark.markov import MarkovChain
from sluice.models.dspark.state import DRAFT_KV, draft_layer_ids, draft_state
from sluice.models.dspark.weights import DSparkWeights
from sluice.models.layers.norm import rms_norm
from sluice.models.llama.model import mlp
from sluice.models.llama.rope import rope_frequencies, rotation_at
from sluice.parallel.group import SINGLE, Parallel
from sluice.pools.base import BufferSpec, RequestTables, StateMemory
from sluice.pools.rows import physical_rows
from sluice.pools.state_rows import state_rows

# Gathered context is bounded by drafting blocks in groups of about this many values.
_VALUES_A_GATHER = 1 << 24


@dataclass(frozen=True)
class Block:
    """One parallel forward's answer: ``hidden_BSD`` after the final norm, ``logits_BSV`` float32.

    Entry s is about the token s + 1 places after the anchor, before the Markov head's correction.
    """

    hidden_BSD: Tensor
    logits_BSV: Tensor


class DSparkDraft:
    """Keeps no request state of its own; shares the target's embeddings and vocabulary."""

    def __init__(
        self,
        config: DSparkConfig,
        weights: DSparkWeights,
        target: ReadableTarget,
        digest: str,
        parallel: Parallel = SINGLE,
    ) -> None:
        check_target(config, target)
        self._config = config
        self._local = config.layers.of_rank(parallel.size)
        self._parallel = parallel
        self._weights = weights
        self._embed, self._vocabulary = target.embedding, target.vocabulary
        self._digest = digest
        self._freq_F = rope_frequencies(config.layers.rope, self._embed.device)

    @property
    def config(self) -> DSparkConfig:
        return self._config

    @property
    def digest(self) -> str:
        """Hex digest of the draft's own tensors and of its configuration."""
        return self._digest

    def state_needs(self, kv_dtype: str) -> tuple[BufferSpec, ...]:
        return draft_state(self._config, kv_dtype, self._parallel.size)

    @torch.no_grad()
    def inject(self, batch: ForwardBatch, captured: Tensor, memory: StateMemory) -> None:
        """Write the context rows of the batch's positions from captured streams ``[T, C * E]``.

        A row depends on its own position's streams only, so rows may be injected in any order, and
        again. The batch's token ids are not looked at.
        """
        weights, layers = self._weights, self._local
        context_TD = F.linear(captured.to(weights.fc.dtype), weights.fc)
        context_TD = rms_norm(context_TD, weights.hidden_norm, layers.norm_eps)
        rotation = rotation_at(self._freq_F, batch.positions_T)
        row_T = physical_rows(
            memory.component(DRAFT_KV), batch.tables, batch.segment_T, batch.positions_T
        )
        for layer_id, layer in zip(draft_layer_ids(self._config), weights.layers, strict=True):
            kv_TK2d = context_kv(context_TD, layer, layers, rotation)
            state_rows(memory, DRAFT_KV, layer_id).write(row_T, kv_TK2d)

    @torch.no_grad()
    def block(
        self, tables: Sequence[RequestTables], anchors: Sequence[int], memory: StateMemory
    ) -> Block:
        """One block a request: ``anchors`` are the newest tokens, at ``kv_len``. Writes nothing."""
        groups = [self._rows(tables[part], anchors[part], memory) for part in self._groups(tables)]
        hidden_BND = torch.cat(groups)
        hidden_BSD = hidden_BND if self._config.sample_from_anchor else hidden_BND[:, 1:]
        return Block(hidden_BSD, self._vocabulary.logits(hidden_BSD).float())

    def markov_chain(self, batch: int) -> MarkovChain:
        return MarkovChain(self._weights.markov, batch)

    @torch.no_grad()
    def confidence(self, hidden_BSD: Tensor, previous_BS: Tensor) -> Tensor | None:
        """Probability that each draft stands, given that those before it do, float32 ``[B, S]``.

        ``previous_BS``: the token before each draft. None when the draft has no such head.
        """
        head, config = self._weights.confidence, self._config.confidence
        if head is None or config is None:
            return None
        features = hidden_BSD.float()
        if config.with_markov:
            embedded = self._weights.markov.w1[previous_BS].float()
            features = torch.cat((features, embedded), dim=-1)
        raw_BS = F.linear(features, head.proj, head.bias).squeeze(-1)
        temperature_S = raw_BS.new_tensor(config.temperatures[: raw_BS.shape[1]])
        return torch.sigmoid(raw_BS / temperature_S)

    def _groups(self, tables: Sequence[RequestTables]) -> Iterator[slice]:
        layers = self._local
        values = 2 * layers.num_kv_heads * layers.head_dim * max(t.kv_len + 1 for t in tables)
        step = max(1, _VALUES_A_GATHER // values)
        for first in range(0, len(tables), step):
            yield slice(first, first + step)

    def _rows(
        self, tables: Sequence[RequestTables], anchors: Sequence[int], memory: StateMemory
    ) -> Tensor:
        """``[B, N, D]`` after the final norm."""
        config, layers, shared = self._config, self._local, self._parallel.all_reduce
        plan = BlockPlan.of(
            tables,
            config.block_rows,
            causal=config.is_causal,
            memory=memory,
            component=memory.component(DRAFT_KV),
            freq_F=self._freq_F,
            group_size=layers.group_size,
        )
        masks = [config.mask_token_id] * (config.block_rows - 1)
        ids_BN = torch.tensor([[anchor, *masks] for anchor in anchors], device=self._embed.device)
        x_BND = self._embed.embed(ids_BN)
        for layer_id, layer in zip(draft_layer_ids(config), self._weights.layers, strict=True):
            normed_BND = rms_norm(x_BND, layer.attn_norm, layers.norm_eps)
            rows = state_rows(memory, DRAFT_KV, layer_id)
            x_BND = x_BND + shared(block_attention(normed_BND, layer, layers, plan, rows))
            x_BND = x_BND + shared(mlp(rms_norm(x_BND, layer.mlp_norm, layers.norm_eps), layer))
        return rms_norm(x_BND, self._weights.norm, layers.norm_eps)


def check_target(config: DSparkConfig, target: ReadableTarget) -> None:
    """Raise ConfigError naming both values where the draft was made for another target."""
    vocab_size, hidden_size = target.embedding.shape
    for field, draft, found in (
        ("num_target_layers", config.num_target_layers, target.num_layers),
        ("vocab_size", config.layers.vocab_size, vocab_size),
        # The draft embeds with the target's table, so its own width must be the target's too.
        ("hidden_size", config.layers.hidden_size, hidden_size),
        ("target_hidden_size", config.target_hidden_size, hidden_size),
    ):
        if draft != found:
            raise ConfigError(
                f"the draft's {field} is {draft}, its target ({target.info.architecture}) has {found}",
                stage="load",
                remedy="use a draft that was trained on this target",
            )
