"""The paged forward of Llama and Qwen3 against transformers: every schedule gives one-shot logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from sluice.config import EngineConfig, PoolConfig, PoolMode, SpecConfig
from sluice.engine.build import build_engine
from sluice.engine.core import EngineCore
from sluice.engine.outputs import ChunkReady, Reserved
from sluice.layout.negotiate import negotiate
from sluice.layout.outcome import Agreement
from sluice.models.base import ForwardBatch, Segment
from sluice.models.llama.load import load_llama
from sluice.models.llama.model import LlamaTarget
from sluice.pools.base import RequestTables
from sluice.pools.memory import Memory, build_memory
from sluice.types import Request, RequestId, Role, Sampling
from tests.parity.llama_oracle import VARIANTS, VOCAB, Oracle, save_oracle
from tests.unit.engine.driving import Story, run_all, run_until_idle, tell
from tests.unit.engine.toy_model import copy_state

TOLERANCE = 1e-4
PAGE = 16
LONGEST = 140
BOUNDARIES = (1, 2, 15, 16, 17, 31, 32, 33, 48, 65)
_POOL = PoolConfig(page_tokens=PAGE, num_pages=120, num_slots=16, fill="nan")


@dataclass(frozen=True)
class Case:
    """A model, its oracle, one token sequence, and the truth about it."""

    oracle: Oracle
    model: LlamaTarget
    ids: list[int]
    logits: Tensor


@dataclass
class Served:
    """One request: its tables and the logits of each committed position."""

    tables: RequestTables
    logits: list[Tensor] = field(default_factory=list)

    def error(self, expected: Tensor) -> float:
        actual = torch.cat(self.logits)
        assert len(actual) == self.tables.kv_len
        return (actual - expected[: len(actual)]).abs().max().item()


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    oracle = save_oracle(request.param, tmp_path_factory.mktemp(request.param))
    ids = torch.randint(3, VOCAB, (LONGEST,), generator=torch.Generator().manual_seed(7)).tolist()
    return Case(oracle, load_llama(oracle.folder), ids, oracle.logits(ids))


def _memory(case: Case) -> Memory:
    """Nothing is clean: fresh pages and the padding page hold NaN."""
    memory = build_memory(case.model.state_needs("float32"), _POOL, 1)
    for component in memory.components():
        for entry in component.entries:
            memory.buffer(component.name, entry.layer_id)[: component.rows_per_item] = float("nan")
    return memory


def _open(memory: Memory, name: str) -> Served:
    return Served(memory.open(RequestId(name), LONGEST))


def _step(case: Case, memory: Memory, work: Sequence[tuple[Served, int]]) -> None:
    """One forward: each request gets its next ``count`` true tokens."""
    segments = []
    for request, count in work:
        start = request.tables.kv_len
        memory.extend(request.tables, start + count)
        segments.append(Segment(request.tables, start, tuple(case.ids[start : start + count])))
    hidden = case.model.forward(ForwardBatch.build(segments, memory), memory)
    rows = case.model.logits(hidden).split([count for _, count in work])
    for (request, count), logits in zip(work, rows, strict=True):
        request.logits.append(logits)
        request.tables.kv_len += count
        memory.advance(request.tables, request.tables.kv_len)


def test_one_shot_over_page_boundaries_then_batched_decode(case: Case) -> None:
    """All boundary lengths in one ragged prefill batch, then decode steps of all together."""
    memory = _memory(case)
    requests = [_open(memory, f"L{length}") for length in BOUNDARIES]
    _step(case, memory, list(zip(requests, BOUNDARIES, strict=True)))
    for _ in range(3):
        _step(case, memory, [(one, 1) for one in requests])
    assert max(one.error(case.logits) for one in requests) <= TOLERANCE


def test_rejected_rows_are_overwritten(case: Case) -> None:
    """A verify block with wrong drafts over a page's end; the next step starts below them."""
    memory = _memory(case)
    one, other = _open(memory, "one"), _open(memory, "other")
    _step(case, memory, [(one, PAGE - 2), (other, 40)])
    start = one.tables.kv_len
    memory.extend(one.tables, start + 4)
    block = (case.ids[start], 1, 2, 1)
    assert block[1] != case.ids[start + 1]
    case.model.forward(ForwardBatch.build([Segment(one.tables, start, block)], memory), memory)
    for _ in range(4):
        _step(case, memory, [(one, 1), (other, 1)])
    assert max(one.error(case.logits), other.error(case.logits)) <= TOLERANCE


def test_chunk_sizes_side_by_side(case: Case) -> None:
    memory = _memory(case)
    requests = {size: _open(memory, f"chunk{size}") for size in (1, 3, 7, 64, LONGEST)}
    for _ in range(20):  # 7 * 20 = LONGEST
        work = [
            (one, min(size, LONGEST - one.tables.kv_len))
            for size, one in requests.items()
            if one.tables.kv_len < LONGEST
        ]
        _step(case, memory, work)
    assert [one.tables.kv_len for one in requests.values()] == [20, 60, LONGEST, LONGEST, LONGEST]
    for size, one in requests.items():
        assert one.error(case.logits) <= TOLERANCE, size


def test_neighbours_do_not_show(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, batched, and batched in gathers of one segment each: the same logits."""
    from sluice.models.llama import plan

    alone = _logits_of_33(case, neighbours=0)
    batched = _logits_of_33(case, neighbours=3)
    monkeypatch.setattr(plan, "_VALUES_A_GATHER", 1)
    apart = _logits_of_33(case, neighbours=3)
    assert (alone - batched).abs().max() <= TOLERANCE
    assert (alone - apart).abs().max() <= TOLERANCE


def _logits_of_33(case: Case, neighbours: int) -> Tensor:
    memory = _memory(case)
    one = _open(memory, "one")
    others = [_open(memory, f"other{i}") for i in range(neighbours)]
    _step(case, memory, [*((other, 50 + 9 * i) for i, other in enumerate(others)), (one, 30)])
    for _ in range(3):
        _step(case, memory, [*((other, 1) for other in others), (one, 1)])
    return torch.cat(one.logits)


@pytest.mark.parametrize("mode", list(PoolMode), ids=lambda mode: mode.value)
def test_greedy_text_through_the_engine(case: Case, mode: PoolMode) -> None:
    """Chunked, mixed and batched by the scheduler, with speculation asked for though there is no
    draft."""
    prompts = [case.ids[5 * n : 5 * n + length] for n, length in enumerate((1, 15, 16, 17, 40))]
    requests = [
        Request(RequestId(f"r{n}"), tuple(prompt), Sampling(max_tokens=12))
        for n, prompt in enumerate(prompts)
    ]
    core = _engine(case, mode)
    stories = run_all(core, requests)
    for one in requests:
        assert stories[one.request_id].tokens == case.oracle.greedy(one.prompt, 12)
        assert set(stories[one.request_id].accepted) <= {None, 0}
    assert core.memory.at_baseline()
    assert core.layout().spec.algorithm == "none"


def _engine(case: Case, mode: PoolMode, role: Role = Role.AGGREGATED) -> EngineCore:
    pool = PoolConfig(mode=mode, page_tokens=PAGE, num_pages=40, num_slots=6, fill="nan")
    config = EngineConfig(max_batch_tokens=24)
    return build_engine(case.oracle.folder, role, pool, SpecConfig(3), config)


def test_disaggregated_text_equals_transformers(case: Case) -> None:
    """Only the rows that the layout calls live reach the decode engine; all else there is NaN."""
    prefill = _engine(case, PoolMode.PAGED, Role.PREFILL)
    decode = _engine(case, PoolMode.PAGED, Role.DECODE)
    assert isinstance(negotiate(prefill.layout(), decode.layout()), Agreement)
    chunks: dict[RequestId, ChunkReady] = {}
    requests = [
        Request(RequestId(f"L{n}"), tuple(case.ids[:n]), Sampling(max_tokens=8))
        for n in (1, 16, 50)
    ]
    for one in requests:
        prefill.submit(one, lambda chunk: chunks.__setitem__(chunk.request_id, chunk))
        decode.submit(one)
    run_until_idle(prefill)
    for output in run_until_idle(decode):
        assert isinstance(output, Reserved)
        chunk, length = chunks[output.request_id], len(output.reservation.request.prompt)
        tables = output.reservation.tables
        copy_state(prefill.memory, chunk.tables, decode.memory, tables, length)
        assert chunk.first_token is not None
        prefill.release(output.request_id)
        decode.adopt(output.request_id, chunk.first_token)
    stories: dict[RequestId, Story] = {}
    tell(stories, run_until_idle(decode))
    for one in requests:
        assert stories[one.request_id].tokens == case.oracle.greedy(one.prompt, 8)


def test_half_precision_history_stays_close(case: Case) -> None:
    """bfloat16 rows in a float32 model: the rounding shows, nothing else does."""
    memory = build_memory(case.model.state_needs("bfloat16"), _POOL, 1)
    one = _open(memory, "bf16")
    for count in (40, 1, 1, 7):
        _step(case, memory, [(one, count)])
    assert 0 < one.error(case.logits) < 0.5
