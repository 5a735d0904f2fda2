"""Every byte that a decode rank needs is written once, by somebody who has it, and nothing else is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sluice.errors import GeometryError
from sluice.layout.component import Component, Coverage, Entry, Kind, Owner, Space
from sluice.layout.explain import explain_outcome
from sluice.layout.layout import Layout
from sluice.layout.negotiate import Agreement, Refusal, negotiate
from sluice.layout.outcome import ComponentPlan, Severity
from sluice.layout.reshard import (
    Deal,
    Way,
    dealt,
    grain_of,
    held_parts,
    local_runs,
    part_index,
    reshard,
)
from sluice.layout.span import Run, pair_runs, runs_of
from tests.unit.layout.example_layouts import SMALL, Pod, layout_of, pair

PAGE, LAYERS = 4, (0, 3)
WIDTHS = (1, 2, 4, 8)
Cells = dict[tuple[int, int], NDArray[np.int64]]  # (rank, layer) -> [rows, row bytes]


def component(
    heads: int, head_bytes: int, ranks: int, *, split: bool, interleave: int = 1
) -> Component:
    """History of one token a row, ``heads`` stretches wide, as ``ranks`` ranks keep it."""
    shards = min(heads, ranks) if split else 1
    shape = (heads // shards, head_bytes)
    entry = Entry(0, "uint8", shape, heads * head_bytes // shards, 0 if split else None, shards)
    return Component(
        name="kv",
        owner=Owner.TARGET,
        kind=Kind.KV,
        space=Space.PAGE,
        coverage=Coverage.HISTORY,
        tokens_per_row=1,
        rows_per_item=PAGE * interleave,
        window_tokens=0,
        num_items=40,
        entries=tuple(replace(entry, layer_id=layer) for layer in LAYERS),
        interleave=interleave,
    )


@dataclass(frozen=True)
class Tables:
    pages: tuple[int, ...]
    page_tokens: int
    slot: int = 1

    def page_table(self, space: Space) -> tuple[int, ...]:
        return self.pages


@dataclass(frozen=True)
class Case:
    prefill: int
    decode: int
    plan: ComponentPlan
    length: int
    source: Tables
    target: Tables


@st.composite
def cases(draw: st.DrawFn) -> Case:
    prefill, decode = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from(WIDTHS))
    split = draw(st.booleans())
    heads = draw(st.sampled_from((1, 2, 4, 8)))
    interleave = 1 if split else draw(st.sampled_from([n for n in WIDTHS if decode % n == 0]))
    length = draw(st.integers(0, 3 * PAGE * interleave + 2))
    size = draw(st.integers(1, 3))
    plan = ComponentPlan(
        "kv",
        component(heads, size, prefill, split=split),
        component(heads, size, decode, split=split, interleave=interleave),
    )
    sides = [
        Tables(tuple(draw(st.permutations(range(1, 40))))[: length // tokens + 1], tokens)
        for tokens in (PAGE, PAGE * interleave)
    ]
    return Case(prefill, decode, plan, length, *sides)


def cell(layer: int, ordinal: int, byte: int) -> int:
    """What byte ``byte`` of a whole row holds: a number that nothing else has."""
    return (layer * 1000 + ordinal) * 1000 + byte + 1


def stretch(one: Component, ranks: int, rank: int) -> range:
    size = one.entries[0].row_bytes
    return range(first := part_index(one.entries[0].shards, ranks, rank) * size, first + size)


def prefilled(case: Case) -> Cells:
    """Every prefill rank's buffers, each with its own part of every row."""
    one, cells = case.plan.prefill, {}
    for rank in range(case.prefill):
        own = stretch(one, case.prefill, rank)
        for layer in LAYERS:
            buffer = np.zeros((one.num_rows, len(own)), np.int64)
            for ordinal in range(case.length):
                (run,) = runs_of(one, case.source, range(ordinal, ordinal + 1))
                buffer[run.first] = [cell(layer, ordinal, byte) for byte in own]
            cells[rank, layer] = buffer
    return cells


def expected(case: Case) -> Cells:
    """Brute force: what every decode rank must hold, 0 where nobody may write."""
    one, cells = case.plan.decode, {}
    for rank in range(case.decode):
        own = stretch(one, case.decode, rank)
        for layer in LAYERS:
            buffer = np.zeros((one.num_rows // one.interleave, len(own)), np.int64)
            for ordinal in range(case.length):
                if ordinal % one.interleave == rank % one.interleave:
                    page = case.target.pages[ordinal // (PAGE * one.interleave)]
                    row = page * PAGE + ordinal % (PAGE * one.interleave) // one.interleave
                    buffer[row] = [cell(layer, ordinal, byte) for byte in own]
            cells[rank, layer] = buffer
    return cells


@given(cases())
def test_relayout_equals_brute_force_and_writes_each_byte_once(case: Case) -> None:
    source, plan = prefilled(case), case.plan
    written: Counter[tuple[int, int, int, int]] = Counter()
    wanted = expected(case)
    result = {key: np.zeros_like(buffer) for key, buffer in wanted.items()}
    runs = runs_of(plan.prefill, case.source, range(case.length))
    granted = runs_of(plan.decode, case.target, range(case.length))
    for pairing in reshard((plan,), case.prefill, case.decode):
        for share in pairing.shares:
            ours = dealt(runs, 0, share.deal)
            theirs = local_runs(dealt(granted, 0, share.deal), plan.decode)
            for source_row, target_row, count in pair_runs(ours, theirs):
                for layer in LAYERS:
                    taken = source[pairing.source, layer][
                        source_row : source_row + count,
                        share.source_offset : share.source_offset + share.num_bytes,
                    ]
                    end = share.target_offset + share.num_bytes
                    result[pairing.target, layer][
                        target_row : target_row + count, share.target_offset : end
                    ] = taken
                    for row in range(target_row, target_row + count):
                        written.update(
                            (pairing.target, layer, row, byte)
                            for byte in range(share.target_offset, end)
                        )
    for key, buffer in wanted.items():
        assert np.array_equal(result[key], buffer), key
    assert set(written.values()) <= {1}
    needed = sum(int((buffer > 0).sum()) for buffer in wanted.values())
    assert len(written) == needed


@given(cases())
def test_both_sides_cut_digests_into_the_same_pieces(case: Case) -> None:
    grain = grain_of(case.plan)
    for one, ranks in ((case.plan.prefill, case.prefill), (case.plan.decode, case.decode)):
        held = [held_parts(one, ranks, rank, grain) for rank in range(ranks)]
        assert {part for parts in held for part in parts} == set(range(grain.parts))
        for rank, parts in enumerate(held):
            own = stretch(one, ranks, rank)
            assert len(parts) * grain.part_bytes == len(own)
            assert not len(parts) or parts.start * grain.part_bytes == own.start


@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (4, 1), (2, 4), (4, 2), (4, 4)])
def test_replicated_state_has_one_elected_writer_a_rank(prefill: int, decode: int) -> None:
    one = component(1, 8, 1, split=False)
    pairings = reshard((ComponentPlan("kv", one, one),), prefill, decode)
    assert [p.target for p in pairings] == list(range(decode))
    busiest = max(Counter(p.source for p in pairings).values())
    assert busiest == max(1, decode // prefill), "the work is spread evenly"


def test_equal_widths_move_whole_rows_rank_to_rank() -> None:
    one = component(4, 2, 4, split=True)
    plan = ComponentPlan("kv", one, one)
    pairings = reshard((plan,), 4, 4)
    assert [(p.source, p.target) for p in pairings] == [(r, r) for r in range(4)]
    assert all(share.way(one, one) is Way.RUNS for p in pairings for share in p.shares)


def test_dealt_rows_start_anywhere() -> None:
    """A chunk that begins at token c: rank r's first row is the first ordinal that is r modulo the width."""
    assert dealt((Run(10, 5),), 6, Deal(1, 4)) == (Run(13, 1),)
    assert dealt((Run(10, 5),), 6, Deal(2, 4)) == (Run(10, 1), Run(14, 1))


def test_a_prefill_that_deals_its_rows_is_refused() -> None:
    plan = ComponentPlan(
        "kv", component(1, 8, 2, split=False, interleave=2), component(1, 8, 2, split=False)
    )
    with pytest.raises(GeometryError, match="dealt to 2 ranks"):
        reshard((plan,), 2, 2)


def test_conv_resharded_as_one_block() -> None:
    """Rows of [query | key | value, heads]: a rank's heads are three stretches. One stretch of the same size
    would be queries and half of the keys, so such rows are refused; rows of [heads, q | k | v] are not.
    """
    blocks_first = component(2, 6, 1, split=True)
    entries = tuple(
        replace(entry, row_shape=(3, 2, 2), shard_axis=1) for entry in blocks_first.entries
    )
    blocks_first = replace(blocks_first, entries=entries)
    halves = tuple(replace(entry, row_shape=(3, 1, 2), row_bytes=6, shards=2) for entry in entries)
    plan = ComponentPlan("kv", blocks_first, replace(blocks_first, entries=halves))
    with pytest.raises(GeometryError, match="along their first axis"):
        reshard((plan,), 1, 2)
    heads_first = ComponentPlan(
        "kv", component(2, 6, 1, split=True), component(2, 6, 2, split=True)
    )
    assert [p.shares[0].source_offset for p in reshard((heads_first,), 1, 2)] == [0, 6]


def test_the_gate_calls_other_widths_convertible() -> None:
    prefill, decode = pair()
    wide = replace(decode, parallelism=replace(decode.parallelism, tensor=4))
    outcome = negotiate(prefill, wide)
    assert isinstance(outcome, Agreement)
    (note,) = [n for n in outcome.notes if n.path == "parallelism.tensor"]
    assert note.severity is Severity.CONVERTIBLE


@pytest.mark.parametrize(("ours", "theirs"), [(2, 3), (4, 6)])
def test_the_gate_refuses_widths_that_do_not_divide(ours: int, theirs: int) -> None:
    layouts = [layout_of(SMALL, Pod(role=role)) for role in ("prefill", "decode")]
    prefill, decode = (
        replace(one, parallelism=replace(one.parallelism, tensor=width))
        for one, width in zip(layouts, (ours, theirs), strict=True)
    )
    outcome = negotiate(prefill, decode)
    assert isinstance(outcome, Refusal)
    (fatal,) = outcome.fatal
    assert (fatal.path, fatal.prefill_value, fatal.decode_value) == (
        "parallelism.tensor",
        str(ours),
        str(theirs),
    )
    assert "SLUICE_DECODE_TP" in fatal.remedy


def test_the_diff_says_who_writes_what_to_whom() -> None:
    prefill, decode = (_wide(role, width) for role, width in (("prefill", 2), ("decode", 4)))
    outcome = negotiate(prefill, decode)
    assert isinstance(outcome, Agreement), outcome
    lines = [" ".join(line.split()) for line in explain_outcome(outcome).splitlines()]
    assert "0 -> 1 kv all bytes 4..8 of 8 8 B a token gathered" in lines
    assert "latent all all 4 B 8 B a token in runs" in lines
    assert "1 -> 3 kv all bytes 4..8 of 8 8 B a token gathered" in lines
    assert any(line.startswith("components[kv].entries[*].shards") for line in lines)


def _wide(role: str, ranks: int) -> Layout:
    """A head-split and a replicated component, as a Llama with a latent would have."""
    base = layout_of(replace(SMALL, ratios=(1, 1, 1, 1)), Pod(role=role, steps=0, page_tokens=PAGE))
    split = component(4, 4, ranks, split=True)
    latent = replace(component(1, 4, ranks, split=False), name="latent")
    return replace(
        base,
        parallelism=replace(base.parallelism, tensor=ranks),
        geometry=replace(base.geometry, window_tokens=0),
        components=(split, latent),
    )
