"""The Kimi Linear target as the engine sees it.

Shape legend: T tokens, P token rows computed, R chosen rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.errors import IllegalTransition, InternalError
from sluice.models.base import ForwardBatch, ModelInfo
from sluice.models.capture import HiddenCapture
from sluice.models.kimi_linear.config import KimiLinearConfig, LayerKind
from sluice.models.kimi_linear.kda import KdaBuffers, KdaTrace, kda
from sluice.models.kimi_linear.mla import mla
from sluice.models.kimi_linear.moe import MoeWeights, dense, moe
from sluice.models.kimi_linear.pending import KimiPendingVerify
from sluice.models.kimi_linear.plan import LatentPlan, StatePlan, groups_of, latent_plan, state_plan
from sluice.models.kimi_linear.state import CONV, LENGTH, MLA, RECURRENT, UNSETTLED, target_state
from sluice.models.kimi_linear.weights import MlaWeights, TargetWeights
from sluice.models.layers.norm import rms_norm
from sluice.models.layers.tokens import TokenTable
from sluice.models.recurrent import PendingVerify, RecurrentTarget
from sluice.parallel.context import NO_CONTEXT, ContextParallel
from sluice.parallel.group import SINGLE, Parallel
from sluice.pools.base import BufferSpec, StateMemory
from sluice.pools.state_rows import state_rows

# Below this many rows CPU libraries multiply matrices by another kernel, and a token's bits would depend
# on how many others share its batch: a verified token would differ from the same one decoded alone.
_ROWS_AT_LEAST = 4


class KimiLinearTarget(RecurrentTarget):
    """``models.capture.ReadableTarget`` with recurrent state. Hidden states are ``[T, D]``, before the
    final norm.

    Ranks that share the model hold the same residual stream and each add their part of a sublayer to it.
    """

    def __init__(
        self,
        config: KimiLinearConfig,
        weights: TargetWeights,
        info: ModelInfo,
        parallel: Parallel = SINGLE,
        context: ContextParallel = NO_CONTEXT,
    ) -> None:
        self._config = config
        self._local = config.of_rank(parallel.size)
        self._parallel = parallel
        self._context = context
        self._weights = weights
        self._info = info
        self._pending: WeakKeyDictionary[StateMemory, PendingVerify] = WeakKeyDictionary()

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def config(self) -> KimiLinearConfig:
        return self._config

    @property
    def local(self) -> KimiLinearConfig:
        """What this rank computes of it."""
        return self._local

    @property
    def num_layers(self) -> int:
        return self._config.num_layers

    @property
    def embedding(self) -> TokenTable:
        return self._weights.embed

    @property
    def vocabulary(self) -> TokenTable:
        return self._weights.head

    def state_needs(self, kv_dtype: str) -> tuple[BufferSpec, ...]:
        return target_state(self._config, kv_dtype, self._parallel.size)

    @torch.no_grad()
    def forward(
        self, batch: ForwardBatch, memory: StateMemory, capture: HiddenCapture | None = None
    ) -> Tensor:
        """Residual stream after the last layer. Every segment's state moves on by the whole segment,
        so a token that may be rejected belongs into ``verify``.

        Raises ``IllegalTransition`` while a verify is open, ``InternalError`` where a segment doesn't
        start at its request's ``kda.length``.
        """
        hidden_TD, _ = self._run(batch, memory, 0, capture)
        return hidden_TD

    @torch.no_grad()
    def verify(
        self,
        batch: ForwardBatch,
        memory: StateMemory,
        num_verify: int,
        capture: HiddenCapture | None = None,
    ) -> tuple[Tensor, PendingVerify]:
        """``models.recurrent.RecurrentTarget.verify``; errors as for ``forward``."""
        if not 1 <= num_verify <= len(batch.segments):
            raise InternalError(
                f"{num_verify} of {len(batch.segments)} segments to verify", stage="verify"
            )
        hidden_TD, pending = self._run(batch, memory, num_verify, capture)
        assert pending is not None
        self._pending[memory] = pending
        return hidden_TD, pending

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """``[R, D]`` -> float32 ``[R, V]``."""
        rows = len(hidden)
        normed = rms_norm(_padded(hidden), self._weights.norm, self._config.norm_eps)
        return self._weights.head.logits(normed)[:rows].float()

    def _run(
        self,
        batch: ForwardBatch,
        memory: StateMemory,
        num_verify: int,
        capture: HiddenCapture | None,
    ) -> tuple[Tensor, PendingVerify | None]:
        self._check_settled(memory)
        lengths = self._lengths(memory)
        _check_starts(batch, lengths)
        groups = groups_of(batch, num_verify)
        states = state_plan(batch, groups, num_verify, self._config.kda.conv_width)
        latents = latent_plan(batch, groups, memory.component(MLA), self._context.rank)
        traces: list[tuple[KdaBuffers, KdaTrace]] = []
        moved = slice(num_verify, None)
        # Should a layer fail, nobody may go on from states of which some have moved.
        lengths[states.slot_S[moved], 0] = UNSETTLED
        x_PD, num_tokens = _padded(self._weights.embed.embed(batch.ids_T)), len(batch.ids_T)
        for layer in range(self.num_layers):
            mixed_PD = self._mix(x_PD, layer, states, latents, memory, traces)
            x_PD = x_PD + self._parallel.all_reduce(mixed_PD)
            x_PD = x_PD + self._parallel.all_reduce(self._feed(x_PD, layer))
            if capture is not None:
                capture.after_layer(layer, x_PD[:num_tokens])
        lengths[states.slot_S[moved], 0] = states.stop_S[moved]
        pending = None
        if num_verify:
            layers = self._config.layers_of(LayerKind.KDA)
            pending = KimiPendingVerify(batch.segments, states, traces, lengths, layers)
        return x_PD[:num_tokens], pending

    def _mix(
        self,
        x_PD: Tensor,
        layer: int,
        states: StatePlan,
        latents: LatentPlan,
        memory: StateMemory,
        traces: list[tuple[KdaBuffers, KdaTrace]],
    ) -> Tensor:
        """A layer's token mixing, ``[P, D]``; a recurrent one adds what its verified rows did."""
        config, weights = self._local, self._weights.layers[layer]
        normed_PD = rms_norm(x_PD, weights.attn_norm, config.norm_eps)
        if isinstance(weights.attn, MlaWeights):
            rows = state_rows(memory, MLA, layer)
            num_tokens = len(states.source_TW)
            return mla(
                normed_PD,
                weights.attn,
                config.mla,
                latents,
                rows,
                config.norm_eps,
                num_tokens,
                self._context,
            )
        buffers = KdaBuffers(memory.buffer(CONV, layer), memory.buffer(RECURRENT, layer))
        out_PD, trace = kda(normed_PD, weights.attn, config.kda, states, buffers, config.norm_eps)
        if trace is not None:
            traces.append((buffers, trace))
        return out_PD

    def _feed(self, x_PD: Tensor, layer: int) -> Tensor:
        """A layer's MLP, dense or of experts, ``[P, D]``."""
        weights = self._weights.layers[layer]
        normed_PD = rms_norm(x_PD, weights.ffn_norm, self._config.norm_eps)
        if isinstance(weights.ffn, MoeWeights):
            return moe(normed_PD, weights.ffn, self._config.moe)
        return dense(normed_PD, weights.ffn)

    def _lengths(self, memory: StateMemory) -> Tensor:
        return memory.buffer(LENGTH, self._config.layers_of(LayerKind.KDA)[0])

    def _check_settled(self, memory: StateMemory) -> None:
        pending = self._pending.get(memory)
        if pending is None:
            return
        if pending.is_open:
            raise IllegalTransition(
                "forward while a verify is open: its recurrent state was neither committed nor "
                "discarded",
                stage="forward",
                remedy="call commit or discard on every PendingVerify",
            )
        del self._pending[memory]  # what it kept of the batch goes with it


def _check_starts(batch: ForwardBatch, lengths: Tensor) -> None:
    """Recurrent state has no positions: only its count says whose tokens it has seen."""
    stored = lengths[batch.tables.slots_S, 0].tolist()
    for segment, length in zip(batch.segments, stored, strict=True):
        if segment.start not in (0, length):
            raise InternalError(
                f"request {segment.tables.request_id} goes on at position {segment.start}, but its "
                f"recurrent state (slot {segment.tables.slot}) has taken in {length} tokens",
                stage="forward",
                remedy="commit every verify, at the accepted length; send every slot before adopting",
            )


def _padded(x_TD: Tensor) -> Tensor:
    return F.pad(x_TD, (0, 0, 0, max(0, _ROWS_AT_LEAST - len(x_TD))))
