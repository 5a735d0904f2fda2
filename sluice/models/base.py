"""What the engine asks of a model: a forward over a ragged batch, logits for chosen rows, and its state needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sluice.pools.base import BatchTables, BufferSpec, RequestTables, StateMemory


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one request: positions ``start .. start + len(token_ids)``.

    For the target ``token_ids[i]`` is the token AT position ``start + i``; for a NextN draft it is the token at
    ``start + i + 1`` (the row at position t pairs the target's streams at t with token t + 1).
    """

    tables: RequestTables
    start: int
    token_ids: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class ForwardBatch:
    """Segments laid end to end. T = total tokens, S = segments. One segment a request."""

    segments: tuple[Segment, ...]
    ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    segment_T: Tensor  # int64, index into segments
    tables: BatchTables

    @classmethod
    def build(cls, segments: Sequence[Segment], memory: StateMemory) -> ForwardBatch:
        device = memory.arena().device
        ids = [token for segment in segments for token in segment.token_ids]
        positions = [p for segment in segments for p in range(segment.start, segment.stop)]
        owner = [i for i, segment in enumerate(segments) for _ in segment.token_ids]
        return cls(
            segments=tuple(segments),
            ids_T=torch.tensor(ids, dtype=torch.int64, device=device),
            positions_T=torch.tensor(positions, dtype=torch.int64, device=device),
            segment_T=torch.tensor(owner, dtype=torch.int64, device=device),
            tables=memory.batch_tables([segment.tables for segment in segments]),
        )


@dataclass(frozen=True)
class ModelInfo:
    """What negotiation compares about a checkpoint. Digests are hex; computed once at load."""

    architecture: str
    config_digest: str
    weights_digest: str
    tokenizer_digest: str
    vocab_size: int
    max_model_tokens: int
    window_tokens: int
    ratios: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    has_draft: bool
    draft_digest: str


class TargetModel(Protocol):
    """The model whose output counts. Reads and writes state only through ``memory``; keeps none of its own."""

    @property
    def info(self) -> ModelInfo: ...

    def state_needs(self, kv_dtype: str) -> tuple[BufferSpec, ...]: ...

    def forward(self, batch: ForwardBatch, memory: StateMemory) -> Tensor:
        """Hidden states ``[T, ...]`` (DeepSeek V4: pre-head streams ``[T, N, D]``). Writes the batch's state.

        Each segment must start where the request's state ends (``start <= tables.kv_len`` after a rollback is the
        caller's business); items for its positions must be mapped. ``kv_len`` is not changed here.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """``[R, ...]`` chosen rows of ``forward``'s result -> fp32 ``[R, vocab]``."""
        ...


class DraftModel(Protocol):
    """A draft that continues from the target's hidden states (NextN)."""

    def state_needs(self, kv_dtype: str) -> tuple[BufferSpec, ...]: ...

    def forward(self, batch: ForwardBatch, hidden: Tensor, memory: StateMemory) -> Tensor:
        """One hidden row per batch row; ``hidden`` is the target's (or, when chaining, the draft's own) at the
        same positions. Window keys below ``tables.draft_valid_from`` are masked."""
        ...

    def logits(self, hidden: Tensor) -> Tensor: ...
