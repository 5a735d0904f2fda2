"""Chain drafting: positions, ids and hidden rows of every draft forward, against a recording draft."""

from __future__ import annotations

import torch
from torch import Tensor

from sluice.config import PoolMode
from sluice.models.base import ForwardBatch, Segment
from sluice.pools.base import BufferSpec, RequestTables, StateMemory
from sluice.pools.memory import Memory, build_memory
from sluice.spec.distribution import distribution
from sluice.spec.draft import DraftTask
from sluice.spec.mtp import MtpDrafter
from sluice.types import RequestId, Sampling
from tests.unit.engine.toy_model import DRAFT_NEEDS, TARGET_NEEDS, VOCAB, ToyDraft, pool_config

Call = tuple[str, int, tuple[int, ...], float]


class RecordingDraft(ToyDraft):
    """Its output row is its input row plus 1, and it proposes the hidden row's first value, modulo V."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[Call]] = []

    def state_needs(self, kv_dtype: str) -> tuple[BufferSpec, ...]:
        return DRAFT_NEEDS

    def forward(self, batch: ForwardBatch, hidden: Tensor, memory: StateMemory) -> Tensor:
        assert len(hidden) == len(batch.ids_T)
        calls: list[Call] = []
        at = 0
        for s in batch.segments:
            calls.append((s.tables.request_id, s.start, s.token_ids, float(hidden[at, 0])))
            at += len(s.token_ids)
        self.calls.append(calls)
        return hidden + 1

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long() % VOCAB, VOCAB).float()


def _memory() -> Memory:
    return build_memory((*TARGET_NEEDS, *DRAFT_NEEDS), pool_config(PoolMode.UNIFIED), 4)


def _open(memory: Memory, name: str, kv_len: int) -> RequestTables:
    tables = memory.open(RequestId(name), 40)
    memory.extend(tables, kv_len + 4)
    tables.kv_len = kv_len
    return tables


def test_observe_keeps_each_segments_last_row_and_the_chain_starts_from_it() -> None:
    memory, draft = _memory(), RecordingDraft()
    drafter = MtpDrafter(draft, memory)
    a, b = _open(memory, "a", 5), _open(memory, "b", 9)
    hidden = torch.tensor([[1.0, 0], [2.0, 0], [6.0, 0]])
    drafter.observe([Segment(a, 3, (7, 8)), Segment(b, 8, (9,))], hidden)
    assert draft.calls == [[("a", 3, (7, 8), 1.0), ("b", 8, (9,), 6.0)]]

    draft.calls.clear()
    proposals = drafter.propose([DraftTask(a, 3, Sampling(), 0), DraftTask(b, 3, Sampling(), 0)])
    # Kept rows are 2 + 1 and 6 + 1; a chain of S drafts needs S - 1 forwards, from position kv_len on.
    assert [p.token_ids for p in proposals] == [(3, 4, 5), (7, 8, 9)]
    assert draft.calls == [
        [("a", 5, (3,), 3.0), ("b", 9, (7,), 7.0)],
        [("a", 6, (4,), 4.0), ("b", 10, (8,), 8.0)],
    ]


def test_requests_with_fewer_steps_leave_the_batch_early() -> None:
    memory, draft = _memory(), RecordingDraft()
    drafter = MtpDrafter(draft, memory)
    a, b, c = _open(memory, "a", 5), _open(memory, "b", 9), _open(memory, "c", 2)
    drafter.observe([Segment(t, 0, (1,)) for t in (a, b, c)], torch.tensor([[1.0, 0]] * 3))
    draft.calls.clear()
    tasks = [DraftTask(t, steps, Sampling(), 0) for t, steps in ((a, 0), (b, 3), (c, 1))]
    assert [p.token_ids for p in drafter.propose(tasks)] == [(), (2, 3, 4), (2,)]
    assert [[call[0] for call in calls] for calls in draft.calls] == [["b"], ["b"]]


def test_nothing_to_draft_runs_nothing() -> None:
    memory, draft = _memory(), RecordingDraft()
    a = _open(memory, "a", 5)
    proposals = MtpDrafter(draft, memory).propose([DraftTask(a, 0, Sampling(), 0)])
    assert proposals[0].token_ids == ()
    assert draft.calls == []


def test_sampled_chains_report_the_distribution_they_drew_from() -> None:
    memory, draft = _memory(), ToyDraft()
    drafter = MtpDrafter(draft, memory)
    a, b = _open(memory, "a", 1), _open(memory, "b", 1)
    drafter.observe([Segment(t, 0, (1,)) for t in (a, b)], torch.tensor([[3.0, 0], [4.0, 0]]))
    warm = Sampling(temperature=0.8, top_k=4, seed=9)
    sampled, greedy = drafter.propose([DraftTask(a, 2, warm, 0), DraftTask(b, 2, Sampling(), 0)])
    assert greedy.q_SV is None
    assert sampled.q_SV is not None
    assert sampled.q_SV.shape == (2, VOCAB)
    row = memory.buffer("draft.hidden", 0)[a.slot : a.slot + 1]
    assert torch.equal(sampled.q_SV[:1], distribution(draft.logits(row), [warm]))
    assert float(sampled.q_SV[0, sampled.token_ids[0]]) > 0
    alone = drafter.propose([DraftTask(a, 2, warm, 0)])[0]
    assert alone.token_ids == sampled.token_ids
