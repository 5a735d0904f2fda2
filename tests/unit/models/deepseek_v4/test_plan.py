"""Index tensors of small batches, against sets written out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from sluice.config import PoolConfig, PoolMode
from sluice.layout.component import Coverage, Kind, Owner
from sluice.models.base import ForwardBatch, Segment
from sluice.models.deepseek_v4.plan import EntryPlan, Rectangle, Segments, TailPlan, WindowPlan
from sluice.pools.base import BufferSpec
from sluice.pools.memory import Memory, build_memory
from sluice.types import RequestId

WINDOW, RATIO, VERIFY = 4, 4, 2


def _spec(
    name: str, kind: Kind, coverage: Coverage, tokens_per_row: int, window: int
) -> BufferSpec:
    return BufferSpec(
        name, Owner.TARGET, kind, coverage, tokens_per_row, window, (0,), "int64", (1,)
    )


SPECS = (
    _spec("target.c4", Kind.C4, Coverage.HISTORY, RATIO, 0),
    _spec("target.swa", Kind.SWA, Coverage.WINDOW, 1, WINDOW),
    _spec("target.c4_tail", Kind.C4_TAIL, Coverage.OVERLAP_TAIL, 1, RATIO),
    _spec("target.c128_tail", Kind.C128_TAIL, Coverage.OPEN_BLOCK, 1, RATIO),
)


class _World:
    """Requests whose every stored row holds 1000 * request + position."""

    def __init__(self, mode: PoolMode, ranges: Sequence[tuple[int, int]]) -> None:
        config = PoolConfig(
            mode=mode, page_tokens=16, num_pages=24, num_window_pages=24, num_slots=4
        )
        self.memory: Memory = build_memory(SPECS, config, VERIFY)
        self.tables = [self.memory.open(RequestId(f"r{i}"), 60) for i in range(len(ranges))]
        self.starts = [0] * len(ranges)
        for request, (start, _) in enumerate(ranges):
            if start:
                self._store([(request, 0, start)])
        self.batch = self._batch([(i, start, stop) for i, (start, stop) in enumerate(ranges)])
        self.segments = Segments.of(self.batch)
        self.rows = self._values(self.batch)

    def buffer(self, name: str) -> torch.Tensor:
        return self.memory.buffer(self.memory.window_name(name), 0)

    def component(self, name: str):  # type: ignore[no-untyped-def]
        return self.memory.component(self.memory.window_name(name))

    def _batch(self, ranges: Sequence[tuple[int, int, int]]) -> ForwardBatch:
        parts = []
        for request, start, stop in ranges:
            self.memory.extend(self.tables[request], stop)
            parts.append(Segment(self.tables[request], start, (request,) * (stop - start)))
        return ForwardBatch.build(parts, self.memory)

    def _values(self, batch: ForwardBatch) -> torch.Tensor:
        return (1000 * batch.ids_T + batch.positions_T).unsqueeze(1)

    def _store(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        batch = self._batch(ranges)
        segments, rows = Segments.of(batch), self._values(batch)
        WindowPlan.of(segments, self.component("target.swa")).store.write(
            self.buffer("target.swa"), rows
        )
        for name in ("target.c4_tail", "target.c128_tail"):
            TailPlan.of(segments, self.component(name)).store.write(self.buffer(name), rows)


@pytest.fixture(params=list(PoolMode), ids=lambda mode: mode.value)
def mode(request: pytest.FixtureRequest) -> PoolMode:
    return request.param  # type: ignore[no-any-return]


def test_window_keys_are_the_last_positions(mode: PoolMode) -> None:
    world = _World(mode, [(0, 2), (9, 20), (3, 4)])
    plan = WindowPlan.of(world.segments, world.component("target.swa"))
    workspace = plan.prior.workspace(world.buffer("target.swa"), world.rows)[:, 0]
    for token, value in enumerate(world.rows[:, 0].tolist()):
        request, position = divmod(value, 1000)
        expected = [1000 * request + p for p in range(max(0, position - WINDOW + 1), position + 1)]
        seen = workspace[plan.key_TK[token]][plan.visible_TK[token]].tolist()
        assert seen == expected
        hidden = workspace[plan.key_TK[token]][~plan.visible_TK[token]].tolist()
        assert all(v == value for v in hidden)  # a row that is certainly finite


def test_rows_never_received_are_not_even_gathered(mode: PoolMode) -> None:
    world = _World(mode, [(9, 12), (9, 10)])
    valid_from = torch.tensor([8, 30])
    plan = WindowPlan.of(world.segments, world.component("target.swa"), valid_from)
    gathered = world.buffer("target.swa")[plan.prior.row_Q][:, 0].tolist()
    assert gathered == [8]
    assert plan.visible_TK.sum(-1).tolist() == [2, 3, 4, 1]


@pytest.mark.parametrize("name", ["target.c4_tail", "target.c128_tail"])
def test_windows_that_close_pool_their_tokens(mode: PoolMode, name: str) -> None:
    world = _World(mode, [(0, 9), (3, 4), (5, 7), (6, 17)])
    plan = TailPlan.of(world.segments, world.component(name))
    workspace = plan.prior.workspace(world.buffer(name), world.rows)[:, 0]
    closing = list(zip(plan.segment_M.tolist(), plan.ordinal_M.tolist(), strict=True))
    assert closing == [(0, 0), (0, 1), (1, 0), (3, 1), (3, 2), (3, 3)]
    reach = RATIO if name == "target.c4_tail" else 0
    for window, (request, ordinal) in enumerate(closing):
        slots = workspace[plan.slot_MP[window]].tolist()
        for slot, position in enumerate(range(ordinal * RATIO - reach, (ordinal + 1) * RATIO)):
            if position >= 0:
                assert slots[slot] == 1000 * request + position
    assert plan.first_M.tolist() == [ordinal == 0 for _, ordinal in closing]
    assert plan.closes


def test_nothing_closes(mode: PoolMode) -> None:
    world = _World(mode, [(5, 7), (0, 1)])
    plan = TailPlan.of(world.segments, world.component("target.c4_tail"))
    assert not plan.closes
    assert len(plan.prior.row_Q) == 0


@pytest.mark.parametrize("name", ["target.swa", "target.c4_tail", "target.c128_tail"])
def test_no_row_is_written_twice(mode: PoolMode, name: str) -> None:
    world = _World(mode, [(0, 15), (2, 14)])
    component = world.component(name)
    plan = (WindowPlan if name == "target.swa" else TailPlan).of(world.segments, component)
    rows = plan.store.row_U.tolist()
    assert len(set(rows)) == len(rows)
    # What a rollback by one token still reads is there.
    plan.store.write(world.buffer(name), world.rows)
    assert world.buffer(name)[rows[-1]].item() == world.rows[-1].item()
    assert 1000 * 1 + 13 - (WINDOW + VERIFY - 2) in world.buffer(name)[:, 0].tolist()


def test_entries_are_visible_once_closed(mode: PoolMode) -> None:
    world = _World(mode, [(0, 9), (14, 17)])
    tail = TailPlan.of(world.segments, world.component("target.c4_tail"))
    component = world.component("target.c4")
    plan = EntryPlan.of(world.batch, world.segments, component, tail)
    assert plan.num_entries == 4
    assert plan.visible_T.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 4, 4]
    rows = plan.row_SE
    assert plan.closing_row_M.tolist() == [rows[0, 0], rows[0, 1], rows[1, 3]]
    assert len({*rows[0, :2].tolist(), *rows[1].tolist()}) == 6
    assert rows[0, 2:].tolist() == [rows[0, 0]] * 2  # no entry: any row of the segment's own


def test_equal_neighbours_form_rectangles(mode: PoolMode) -> None:
    world = _World(mode, [(0, 2), (3, 5), (0, 1)])
    tail = TailPlan.of(world.segments, world.component("target.c4_tail"))
    plan = EntryPlan.of(world.batch, world.segments, world.component("target.c4"), tail)
    assert plan.rectangles == (
        Rectangle(slice(0, 2), slice(0, 4), 2),
        Rectangle(slice(2, 3), slice(4, 5), 1),
    )
