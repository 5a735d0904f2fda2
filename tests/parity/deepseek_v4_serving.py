"""Drives a loaded DeepSeek-V4 model the way the engine does, on memory where nothing is clean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sluice.config import PoolConfig, PoolMode
from sluice.models.base import ForwardBatch, Segment
from sluice.models.deepseek_v4.load import LoadedDeepseekV4
from sluice.pools.base import RequestTables
from sluice.pools.memory import Memory, build_memory
from sluice.types import RequestId

VERIFY_TOKENS = 4


@dataclass
class Served:
    """One request: its tables and the logits of each committed position."""

    tables: RequestTables
    logits: list[Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.tables.kv_len


@dataclass(frozen=True)
class Step:
    """What one request does in one forward: these tokens, of which ``commit`` count."""

    request: Served
    token_ids: Sequence[int]
    commit: int


class Serving:
    """Opens requests and steps them together. Padding and fresh items hold NaN."""

    def __init__(
        self,
        model: LoadedDeepseekV4,
        mode: PoolMode,
        *,
        kv_dtype: str = "float32",
        num_slots: int = 24,
        page_tokens: int = 128,
    ) -> None:
        self.model = model
        assert model.draft is not None
        self.draft = model.draft
        needs = model.target.state_needs(kv_dtype) + model.draft.state_needs(kv_dtype)
        config = PoolConfig(
            mode=mode,
            page_tokens=page_tokens,
            num_pages=110 * 128 // page_tokens,
            num_window_pages=100 * 128 // page_tokens,
            num_slots=num_slots,
            kv_dtype=kv_dtype,
            fill="nan",
        )
        self._stepped: tuple[Served, ...] = ()
        self.memory: Memory = build_memory(needs, config, VERIFY_TOKENS)
        for component in self.memory.components():
            for entry in component.entries:
                buffer = self.memory.buffer(component.name, entry.layer_id)
                buffer[: component.rows_per_item] = float("nan")

    def open(self, name: str, max_tokens: int = 560) -> Served:
        return Served(self.memory.open(RequestId(name), max_tokens))

    def step(self, steps: Sequence[Step]) -> Tensor:
        """One target forward; returns its streams. Committed positions' logits are kept.

        What the last step committed frees its pages only now: the draft still read them in between.
        """
        self._advance()
        segments = []
        for step in steps:
            start = step.request.length
            self.memory.extend(step.request.tables, start + len(step.token_ids))
            segments.append(Segment(step.request.tables, start, tuple(step.token_ids)))
        batch = ForwardBatch.build(segments, self.memory)
        streams = self.model.target.forward(batch, self.memory)
        logits = self.model.target.logits(streams).split([len(s.token_ids) for s in steps])
        for step, rows in zip(steps, logits, strict=True):
            step.request.logits.append(rows[: step.commit])
            step.request.tables.kv_len += step.commit
        self._stepped = tuple(step.request for step in steps)
        return streams

    def draft_rows(
        self, request: Served, start: int, next_ids: Sequence[int], hidden: Tensor
    ) -> Tensor:
        """The draft's streams at positions ``start ..`` of one request."""
        segment = Segment(request.tables, start, tuple(next_ids))
        return self.draft.forward(ForwardBatch.build([segment], self.memory), hidden, self.memory)

    def _advance(self) -> None:
        for request in self._stepped:
            self.memory.advance(request.tables, request.length)
        self._stepped = ()

    def close(self, requests: Sequence[Served]) -> None:
        """Everything goes back, and the books balance."""
        self._advance()
        for request in requests:
            self.memory.close(request.tables)
        self.memory.check()
        assert self.memory.at_baseline()


def error(request: Served, expected: Tensor) -> float:
    """Largest difference of the committed logits to the first rows of ``expected``; argmax must agree."""
    actual = torch.cat(request.logits)
    truth = expected[: len(actual)]
    assert len(actual) == request.length
    assert torch.equal(actual.argmax(-1), truth.argmax(-1))
    return (actual - truth).abs().max().item()
