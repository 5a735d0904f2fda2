"""Chain drafting with one NextN layer: its own output feeds the next step (top-k 1, S steps).

With n committed tokens and the newest token at position n, the draft's row n - 1 (kept in
``draft.hidden``) already predicts position n + 1. Each further draft needs one forward at n, n + 1,
... with (own output, drafted token). Suffixes: B requests, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sluice.models.base import DraftModel, ForwardBatch, Segment
from sluice.pools.base import RequestTables, StateMemory
from sluice.spec.distribution import distribution, is_greedy, pick
from sluice.spec.draft import DraftTask, Proposal
from sluice.spec.draws import Purpose, uniform

ALGORITHM = "mtp"
HIDDEN = "draft.hidden"


class MtpDrafter:
    """``spec.draft.Drafter`` over a ``DraftModel``; all state lies in ``memory``."""

    algorithm = ALGORITHM
    captured_layers: tuple[int, ...] = ()  # it reads the target's result

    def __init__(self, draft: DraftModel, memory: StateMemory) -> None:
        self._draft = draft
        self._memory = memory
        component = memory.component(HIDDEN)
        self._hidden = memory.buffer(HIDDEN, component.entries[0].layer_id)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Proposal]:
        chains = [_Chain(task) for task in tasks]
        active = [chain for chain in chains if chain.task.steps > 0]
        if not active:
            return [chain.proposal() for chain in chains]
        hidden = self._hidden[self._slots([chain.task.tables for chain in active])]
        while True:
            self._extend_chains(active, self._draft.logits(hidden))
            going = [i for i, chain in enumerate(active) if chain.wants_more]
            if not going:
                return [chain.proposal() for chain in chains]
            if len(going) < len(active):
                hidden, active = hidden[going], [active[i] for i in going]
            segments = [chain.next_segment() for chain in active]
            batch = ForwardBatch.build(segments, self._memory)
            hidden = self._draft.forward(batch, hidden, self._memory)

    def observe(self, segments: Sequence[Segment], hidden: Tensor) -> None:
        batch = ForwardBatch.build(segments, self._memory)
        own = self._draft.forward(batch, hidden, self._memory)
        last, at = [], 0
        for segment in segments:
            at += len(segment.token_ids)
            last.append(at - 1)
        slots = self._slots([segment.tables for segment in segments])
        self._hidden[slots] = own[last].to(self._hidden.dtype)

    def _slots(self, tables: Sequence[RequestTables]) -> Tensor:
        return torch.tensor([t.slot for t in tables], device=self._hidden.device)

    def _extend_chains(self, active: Sequence[_Chain], logits_BV: Tensor) -> None:
        if all(is_greedy(chain.task.sampling) for chain in active):
            for chain, token in zip(active, logits_BV.argmax(dim=-1).tolist(), strict=True):
                chain.token_ids.append(token)
            return
        q_BV = distribution(logits_BV, [chain.task.sampling for chain in active])
        tokens = pick(q_BV, [chain.draw() for chain in active])
        for chain, token, q_V in zip(active, tokens, q_BV, strict=True):
            chain.token_ids.append(token)
            chain.q.append(q_V)


class _Chain:
    """One request's drafts while they are being made."""

    def __init__(self, task: DraftTask) -> None:
        self.task = task
        self.token_ids: list[int] = []
        self.q: list[Tensor] = []

    @property
    def wants_more(self) -> bool:
        return len(self.token_ids) < self.task.steps

    def draw(self) -> float:
        position = self.task.tables.kv_len + 1 + len(self.token_ids)
        return uniform(self.task.sampling.seed, position, Purpose.DRAFT)

    def next_segment(self) -> Segment:
        """The drafted token i stands at n + 1 + i, and its draft row at n + i."""
        position = self.task.tables.kv_len + len(self.token_ids) - 1
        return Segment(self.task.tables, position, (self.token_ids[-1],))

    def proposal(self) -> Proposal:
        sampled = self.q and not is_greedy(self.task.sampling)
        return Proposal(tuple(self.token_ids), torch.stack(self.q) if sampled else None)
