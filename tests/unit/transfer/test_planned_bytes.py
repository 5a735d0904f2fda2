"""What all prefill ranks' senders hand to their links, byte by byte, against what every decode rank must hold.

Memory is an array of numbers, one a byte: each source byte has its own, so a byte that went astray shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sluice.layout import reshard as resharding
from sluice.layout.component import Component, Coverage, Entry, Kind, Owner, Space
from sluice.layout.outcome import ComponentPlan
from sluice.layout.reshard import part_index, reshard, shards_of
from sluice.layout.span import live_ordinals, span
from sluice.pools.base import Region
from sluice.transfer.plane import Link, Movement, Pack, Write
from sluice.transfer.sender import Route, Sender
from sluice.transfer.staging import unpacked
from sluice.transfer.worker import TransferWorker
from sluice.transfer.writes import group_writes, plan_writes

PAGE, PAGES, SLOTS = 4, 24, 3
WIDTHS = (1, 2, 4)
BASE = 1000
Memory = NDArray[np.int64]


@dataclass(frozen=True)
class Tables:
    pages: tuple[int, ...]
    page_tokens: int
    slot: int

    def page_table(self, space: Space) -> tuple[int, ...]:
        return self.pages


@dataclass(frozen=True)
class Kept:
    """A component before it is spread over ranks: rows of ``heads`` stretches of ``head_bytes``."""

    name: str
    coverage: Coverage
    ratio: int
    heads: int
    head_bytes: int
    split: bool
    dealt: bool
    layers: tuple[int, ...]

    def on(self, ranks: int, interleave: int) -> Component:
        shards = min(self.heads, ranks) if self.split else 1
        width = self.heads * self.head_bytes // shards
        axis = 0 if self.split else None
        last = self.coverage is Coverage.LAST
        return Component(
            name=self.name,
            owner=Owner.TARGET,
            kind=Kind.KV,
            space=Space.REQUEST_SLOT if last else Space.PAGE,
            coverage=self.coverage,
            tokens_per_row=self.ratio,
            rows_per_item=1 if last else PAGE * interleave // self.ratio,
            window_tokens=0,
            num_items=SLOTS + 1 if last else PAGES + 1,
            entries=tuple(Entry(n, "uint8", (width,), width, axis, shards) for n in self.layers),
            interleave=interleave if self.dealt else 1,
        )


@dataclass(frozen=True)
class Case:
    prefill: int
    decode: int
    context: int
    kept: tuple[Kept, ...]
    length: int
    have: int
    cuts: tuple[int, ...]  # where chunks of the prompt end
    source: Tables
    target: Tables

    @property
    def plans(self) -> tuple[ComponentPlan, ...]:
        return tuple(
            ComponentPlan(one.name, one.on(self.prefill, 1), one.on(self.decode, self.context))
            for one in self.kept
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    prefill, decode = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from(WIDTHS))
    context = draw(st.sampled_from([n for n in WIDTHS if decode % n == 0]))
    kept = []
    for index in range(draw(st.integers(1, 3))):
        coverage = draw(st.sampled_from((Coverage.HISTORY, Coverage.HISTORY, Coverage.LAST)))
        history = coverage is Coverage.HISTORY
        dealt = history and draw(st.booleans())
        kept.append(
            Kept(
                f"c{index}",
                coverage,
                draw(st.sampled_from((1, 2, 4))) if history and not dealt else 1,
                draw(st.sampled_from(WIDTHS)),
                draw(st.integers(1, 3)),
                not dealt and draw(st.booleans()),
                dealt,
                (0, 3)[: draw(st.integers(1, 2))],
            )
        )
    wide = PAGE * context
    length = draw(st.integers(1, 3 * wide + 2))
    have = wide * draw(st.integers(0, (length - 1) // wide))
    inner = sorted(draw(st.sets(st.integers(have + 1, length), max_size=3)) - {length})
    sides = []
    for tokens in (PAGE, wide):
        pages = tuple(draw(st.permutations(range(1, PAGES + 1))))[: length // tokens + 1]
        sides.append(Tables(pages, tokens, draw(st.integers(1, SLOTS))))
    return Case(prefill, decode, context, tuple(kept), length, have, (*inner, length), *sides)


def regions(components: Sequence[Component]) -> tuple[Region, ...]:
    found, at = [], BASE
    for component in components:
        for entry in component.entries:
            rows, size = component.own_rows, entry.row_bytes
            found.append(Region(component.name, entry.layer_id, at, rows, size))
            at += rows * size + 7
    return tuple(found)


def blank(components: Sequence[Component]) -> Memory:
    return np.zeros(
        max(r.address + r.num_rows * r.row_bytes for r in regions(components)), np.int64
    )


def identity(component: int, layer: int, ordinal: int, byte: int) -> int:
    """A number that no other byte of the model's state has."""
    return ((component * 10 + layer) * 1000 + ordinal) * 1000 + byte + 1


def fill(
    memory: Memory,
    case: Case,
    rank: int,
    ranks: int,
    components: Sequence[Component],
    tables: Tables,
) -> None:
    """Brute force: the state of the whole prompt as one rank keeps it. From ``have`` on, if it is decode's."""
    decode = tables is case.target
    for number, (component, kept) in enumerate(zip(components, case.kept, strict=True)):
        held, deals = part_index(shards_of(component), ranks, rank), component.interleave
        for region in (r for r in regions(components) if r.component == component.name):
            first_byte = held * region.row_bytes
            for ordinal in live_ordinals(component, case.length, case.have if decode else 0):
                if ordinal % deals != rank % deals:
                    continue
                if component.coverage is Coverage.LAST:
                    row = tables.slot
                else:
                    page, inside = divmod(ordinal * kept.ratio, tables.page_tokens)
                    row = tables.pages[page] * component.rows_per_item // deals
                    row += inside // kept.ratio // deals
                at = region.address + row * region.row_bytes
                memory[at : at + region.row_bytes] = [
                    identity(number, region.layer_id, ordinal, first_byte + byte)
                    for byte in range(region.row_bytes)
                ]


class Recorder:
    """Stands for the I/O thread: keeps what was handed to it."""

    def __init__(self) -> None:
        self.moves: list[Movement] = []

    def submit(
        self, link: Link, moves: Sequence[Movement], fence: Callable[[], None], deadline_s: float
    ) -> None:
        self.moves += moves


def run(case: Case, max_bytes: int, max_writes: int) -> tuple[list[Memory], list[Memory]]:
    """Every decode rank's memory afterwards, and how often each of its bytes was written."""
    plans = case.plans
    ours, theirs = [plan.prefill for plan in plans], [plan.decode for plan in plans]
    results = [blank(theirs) for _ in range(case.decode)]
    counts = [np.zeros_like(result) for result in results]
    for rank in range(case.prefill):
        source = blank(ours)
        fill(source, case, rank, case.prefill, ours, case.source)
        for pairing in reshard(plans, case.prefill, case.decode):
            if pairing.source != rank:
                continue
            shares = {share.component: share for share in pairing.shares}
            link = cast("Link", None)
            route = Route(link, plans, regions(ours), regions(theirs), shares)
            recorder = Recorder()
            grants = {
                plan.name: span(plan.decode, case.target, case.length, case.have) for plan in plans
            }
            sender = Sender(
                cast("TransferWorker", recorder),
                route,
                grants,
                length=case.length,
                have=case.have,
                deadline_s=1.0,
            )
            start = case.have
            for stop in case.cuts:
                sender.send(case.source, start, stop, stop == case.length, lambda: None)
                start = stop
            for group in group_writes(recorder.moves, max_bytes, max_writes):
                assert sum(move.num_bytes for move in group) <= max_bytes
                alone = unpacked(group)
                assert len(alone) <= max_writes
                for write in alone:
                    here = slice(write.source, write.source + write.num_bytes)
                    there = slice(write.destination, write.destination + write.num_bytes)
                    results[pairing.target][there] = source[here]
                    counts[pairing.target][there] += 1
    return results, counts


def check(case: Case, max_bytes: int = 64, max_writes: int = 8) -> None:
    components = [plan.decode for plan in case.plans]
    results, counts = run(case, max_bytes, max_writes)
    for rank, (result, count) in enumerate(zip(results, counts, strict=True)):
        wanted = blank(components)
        fill(wanted, case, rank, case.decode, components, case.target)
        assert np.array_equal(result, wanted), f"decode rank {rank}"
        assert np.array_equal(count, (wanted > 0).astype(np.int64)), f"decode rank {rank}"


@given(cases(), st.integers(1, 64), st.integers(1, 8))
def test_every_byte_that_matters_is_written_once_and_none_outside(
    case: Case, max_bytes: int, max_writes: int
) -> None:
    check(case, max_bytes, max_writes)


def _latents(decode: int, length: int) -> Case:
    kept = Kept("latents", Coverage.HISTORY, 1, 1, 5, False, True, (0,))
    source = Tables(tuple(range(PAGES, 0, -1)), PAGE, 1)
    target = Tables((9, 2, 3, 17), PAGE * decode, 1)
    return Case(2, decode, decode, (kept,), length, 0, (length,), source, target)


def _moves(case: Case) -> list[Movement]:
    """What goes to the last decode rank."""
    (plan,) = case.plans
    return list(
        plan_writes(
            plan.prefill,
            plan.decode,
            span(plan.prefill, case.source, case.length),
            span(plan.decode, case.target, case.length),
            regions([plan.prefill]),
            regions([plan.decode]),
            share=reshard(case.plans, case.prefill, case.decode)[-1].shares[0],
        )
    )


@pytest.mark.parametrize("decode", [2, 4])
def test_one_write_a_stretch_of_the_destination(decode: int) -> None:
    """Three pages of decode, the last two neighbours: two stretches on each rank, however many rows."""
    moves = _moves(_latents(decode, 3 * PAGE * decode))
    assert [type(move) for move in moves] == [Pack, Pack]
    assert [move.num_bytes for move in moves] == [PAGE * 5, 2 * PAGE * 5]


def test_large_pieces_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resharding, "GATHER_BELOW_BYTES", 5)
    case = _latents(4, 40)
    assert {type(move) for move in _moves(case)} == {Write}
    check(case)


@pytest.mark.parametrize("prefill", WIDTHS)
@pytest.mark.parametrize("decode", WIDTHS)
def test_every_length_around_a_page(prefill: int, decode: int) -> None:
    """All widths and every way to deal; split, shared and dealt history and a split state at once."""
    kept = (
        Kept("split", Coverage.HISTORY, 1, 2, 2, True, False, (0, 1)),
        Kept("latents", Coverage.HISTORY, 1, 1, 3, False, True, (2,)),
        Kept("pooled", Coverage.HISTORY, 2, 1, 2, False, False, (3,)),
        Kept("state", Coverage.LAST, 1, 4, 1, True, False, (4,)),
    )
    for context in (n for n in WIDTHS if decode % n == 0):
        wide = PAGE * context
        edges = {n for edge in (1, PAGE, wide, 2 * wide) for n in (edge - 1, edge, edge + 1)}
        for length in sorted(edges - {0}):
            tables = [
                Tables(pages[: length // tokens + 1], tokens, slot)
                for pages, tokens, slot in (
                    (tuple(range(PAGES, 0, -1)), PAGE, 1),
                    ((5, 6, 2, 9), wide, 2),
                )
            ]
            check(Case(prefill, decode, context, kept, length, 0, (length,), *tables))
            if length > wide:
                check(Case(prefill, decode, context, kept, length, wide, (length,), *tables))
