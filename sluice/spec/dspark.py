"""Block drafting with DSPARK: one parallel forward, then a tiny correction a position.

The block's logits don't depend on what is drafted in it; the Markov head adds what the token drafted
just before says. So each draft's distribution given those before it is known exactly, which is all that
rejection sampling needs. Suffixes: B requests, S drafts a block, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sluice.models.base import ForwardBatch, Segment
from sluice.models.dspark.config import check_steps
from sluice.models.dspark.model import Block, DSparkDraft
from sluice.pools.base import StateMemory
from sluice.spec.distribution import distribution, is_greedy, pick
from sluice.spec.draft import DraftTask, Proposal
from sluice.spec.draws import Purpose, uniform
from sluice.spec.planner import Planner, StaticPlanner

ALGORITHM = "dspark"


class DSparkDrafter:
    """``spec.draft.Drafter`` over a ``DSparkDraft``; all state lies in ``memory``.

    Between steps the draft's context covers exactly the committed positions, so a request whose rows
    were copied from elsewhere drafts as if it had never moved.
    """

    algorithm = ALGORITHM

    def __init__(
        self,
        draft: DSparkDraft,
        memory: StateMemory,
        steps: int,
        planner: Planner | None = None,
    ) -> None:
        """Raises ConfigError unless ``steps`` is the draft's block size."""
        check_steps(draft.config, steps)
        self._draft = draft
        self._memory = memory
        self._planner = planner or StaticPlanner()

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Target layers whose residual streams ``observe`` wants, in this order."""
        return self._draft.config.target_layer_ids

    def propose(self, tasks: Sequence[DraftTask]) -> list[Proposal]:
        """One proposal a task, in order; ``task.steps`` below the block size keeps the block's start."""
        active = [i for i, task in enumerate(tasks) if task.steps > 0]
        proposals = [Proposal((), None) for _ in tasks]
        if not active:
            return proposals
        chosen = [tasks[i] for i in active]
        anchors = [task.newest_token for task in chosen]
        block = self._draft.block([task.tables for task in chosen], anchors, self._memory)
        for i, proposal in zip(active, self._sample(chosen, anchors, block), strict=True):
            proposals[i] = proposal
        return proposals

    def observe(self, segments: Sequence[Segment], hidden: Tensor) -> None:
        """Write the context of the segments' positions; ``hidden`` is what the target's
        ``HiddenCapture`` holds for them, ``[T, layers * E]``. Token ids are not needed.
        """
        self._draft.inject(ForwardBatch.build(segments, self._memory), hidden, self._memory)

    def _sample(
        self, tasks: Sequence[DraftTask], anchors: Sequence[int], block: Block
    ) -> list[Proposal]:
        chain = self._draft.markov_chain(len(tasks))
        previous_B = torch.tensor(anchors, device=block.logits_BSV.device)
        greedy = all(is_greedy(task.sampling) for task in tasks)
        drafted: list[Tensor] = []
        known: list[Tensor] = [previous_B]
        q: list[Tensor] = []
        for step in range(max(task.steps for task in tasks)):
            bias_BV = chain.step(previous_B, block.hidden_BSD[:, step])
            logits_BV = block.logits_BSV[:, step] + bias_BV
            if greedy:
                previous_B = logits_BV.argmax(dim=-1)
            else:
                q_BV = distribution(logits_BV, [task.sampling for task in tasks])
                draws = [_draw(task, step) for task in tasks]
                previous_B = torch.tensor(pick(q_BV, draws), device=logits_BV.device)
                q.append(q_BV)
            drafted.append(previous_B)
            known.append(previous_B)
        token_BS = torch.stack(drafted, dim=1)
        q_BSV = torch.stack(q, dim=1) if q else None
        lengths = self._plan(tasks, block, torch.stack(known[:-1], dim=1))
        return [
            _proposal(task, token_S, None if q_BSV is None else q_BSV[i], length)
            for i, (task, token_S, length) in enumerate(
                zip(tasks, token_BS.tolist(), lengths, strict=True)
            )
        ]

    def _plan(self, tasks: Sequence[DraftTask], block: Block, previous_BS: Tensor) -> list[int]:
        confidence_BS = None
        if self._planner.wants_confidence:
            hidden_BSD = block.hidden_BSD[:, : previous_BS.shape[1]]
            confidence_BS = self._draft.confidence(hidden_BSD, previous_BS)
        return self._planner.lengths(confidence_BS, [task.steps for task in tasks])


def _draw(task: DraftTask, step: int) -> float:
    return uniform(task.sampling.seed, task.tables.kv_len + 1 + step, Purpose.DRAFT)


def _proposal(task: DraftTask, tokens: Sequence[int], q_SV: Tensor | None, length: int) -> Proposal:
    assert 0 <= length <= task.steps, "a planner can only shorten"
    sampled = q_SV is not None and not is_greedy(task.sampling)
    return Proposal(tuple(tokens[:length]), q_SV[:length] if q_SV is not None and sampled else None)
