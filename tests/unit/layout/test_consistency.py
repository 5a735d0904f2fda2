"""What a single pod's layout must keep: draft rules with both geometries in the message, ring
lengths.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.errors import GeometryError
from sluice.layout.component import Component, Coverage, Entry, Kind, Owner, Space
from sluice.layout.consistency import check_layout, live_rows, rows_needed
from sluice.layout.layout import Layout
from sluice.layout.negotiate import Refusal, negotiate
from sluice.layout.span import live_ordinals
from tests.unit.layout.example_layouts import (
    FLASH,
    PRO,
    SMALL,
    Dims,
    Pod,
    layout_of,
    pair,
    with_component,
    with_entry,
)


@pytest.mark.parametrize("dims", [SMALL, FLASH, PRO])
@pytest.mark.parametrize("mode", ["paged", "unified"])
@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_a_well_built_pod_passes(dims: Dims, mode: str, role: str, steps: int) -> None:
    check_layout(layout_of(dims, Pod(role=role, mode=mode, steps=steps)))


def problem(layout: Layout) -> str:
    with pytest.raises(GeometryError) as caught:
        check_layout(layout)
    return str(caught.value)


def test_a_draft_that_compresses_is_refused_with_both_ratio_lists() -> None:
    layout = layout_of(SMALL, Pod())
    text = problem(replace(layout, spec=replace(layout.spec, draft_ratios=(4,))))
    assert "every draft layer must be window-only" in text
    assert "target ratios 0 4 128 4, draft ratios 4" in text


def _dspark(mode: str = "paged") -> Layout:
    """The small pod with its NextN draft exchanged for a DSPARK one."""
    layout = layout_of(SMALL, Pod(mode=mode))
    target = tuple(c for c in layout.components if c.owner is Owner.TARGET)
    page = layout.geometry.page_tokens
    entries = tuple(Entry(n, "float32", (2, 2, 8), 128, 0) for n in (4, 5))
    context = Component(
        name="draft.kv",
        owner=Owner.DRAFT,
        kind=Kind.KV,
        space=Space.PAGE,
        coverage=Coverage.HISTORY,
        tokens_per_row=1,
        rows_per_item=page,
        window_tokens=0,
        num_items=9,
        entries=entries,
    )
    spec = replace(layout.spec, algorithm="dspark", draft_ratios=(1, 1))
    return replace(layout, spec=spec, components=(*target, context))


@pytest.mark.parametrize("mode", ["paged", "unified"])
def test_a_dspark_draft_keeps_the_whole_context(mode: str) -> None:
    check_layout(_dspark(mode))


@pytest.mark.parametrize(
    ("algorithm", "ratios", "words"),
    [
        ("dspark", (0, 0), "every draft layer must keep each token"),
        ("dspark", (1, 0), "every draft layer must keep each token"),
        ("mtp", (1, 1), "every draft layer must be window-only"),
        ("mtp", (), "every draft layer must be window-only"),
        ("eagle", (1, 1), "the algorithm must be one of none mtp dspark"),
    ],
)
def test_draft_ratios_go_by_algorithm(algorithm: str, ratios: tuple[int, ...], words: str) -> None:
    layout = _dspark()
    spec = replace(layout.spec, algorithm=algorithm, draft_ratios=ratios)
    assert words in problem(replace(layout, spec=spec))


@pytest.mark.parametrize(
    "change",
    [
        {"coverage": Coverage.WINDOW},
        {"kind": Kind.SWA},
        {"tokens_per_row": 4},
        {"space": Space.WINDOW_PAGE},
    ],
)
def test_a_dspark_draft_has_token_rows_of_keys_and_values_in_pages(
    change: dict[str, object],
) -> None:
    text = problem(with_component(_dspark(), "draft.kv", **change))
    assert "a dspark draft has one component: KV history, one token a row, in pages" in text


def test_a_dspark_draft_has_no_second_component() -> None:
    layout, other = _dspark(), layout_of(SMALL, Pod())
    extra = tuple(c for c in other.components if c.name == "draft.hidden")
    text = problem(replace(layout, components=layout.components + extra))
    assert "a dspark draft has one component" in text


def test_a_paged_draft_beside_a_unified_target_is_refused_with_both_geometries() -> None:
    layout = layout_of(SMALL, Pod(mode="unified"))
    text = problem(with_component(layout, "draft.swa_ring", space=Space.WINDOW_PAGE))
    assert "target and draft must both be paged or both unified" in text
    assert "target: RING_ROW, window 128, 131 rows an item, 17 items" in text
    assert "draft: WINDOW_PAGE, window 128, 131 rows an item, 17 items" in text


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("window_tokens", 64, "the same window"),
        ("rows_per_item", 140, "the same rows a page or ring"),
        ("num_items", 9, "the same window pages or rings"),
    ],
)
@pytest.mark.parametrize("mode", ["paged", "unified"])
def test_a_draft_window_of_another_geometry_is_refused_with_both(
    mode: str, field: str, value: int, rule: str
) -> None:
    name = "draft.swa" if mode == "paged" else "draft.swa_ring"
    text = problem(with_component(layout_of(SMALL, Pod(mode=mode)), name, **{field: value}))
    assert f"components[{name}].{field}: target and draft must have {rule}" in text
    assert text.count("target: ") == 1
    assert f"{value}" in text.split("draft: ")[1]


def test_a_draft_component_before_the_targets_is_refused() -> None:
    layout = layout_of(SMALL, Pod())
    draft, rest = layout.component("draft.swa"), layout.components
    moved = (draft, *(c for c in rest if c is not draft))
    assert "must come after all of the target's" in problem(replace(layout, components=moved))


def test_a_draft_layer_merged_into_the_targets_window_is_refused() -> None:
    layout = layout_of(SMALL, Pod())
    window = layout.component("target.swa")
    merged = (*window.entries, replace(window.entries[0], layer_id=len(SMALL.ratios)))
    text = problem(with_component(layout, "target.swa", entries=merged))
    assert "none of the draft's" in text
    assert "layers 0 1 2 3 4 of a target with 4 layers" in text


def test_draft_state_under_the_targets_name_is_refused() -> None:
    layout = layout_of(SMALL, Pod())
    text = problem(with_component(layout, "draft.swa", owner=Owner.TARGET))
    assert "draft state must be a component of its own" in text


def test_a_pod_that_says_it_does_not_draft_has_no_draft_components() -> None:
    layout = layout_of(SMALL, Pod())
    spec = layout_of(SMALL, Pod(steps=0)).spec
    assert "exactly when it drafts" in problem(replace(layout, spec=spec))


def test_two_equal_pods_that_are_equally_wrong_are_refused() -> None:
    prefill, decode = (
        with_component(layout, "draft.swa", num_items=9) for layout in pair(mode="paged")
    )
    outcome = negotiate(prefill, decode)
    assert isinstance(outcome, Refusal)
    (mismatch,) = outcome.mismatches
    assert mismatch.path == "components[draft.swa].num_items"
    assert mismatch.prefill_value == mismatch.decode_value
    assert "broken on both pods" in mismatch.explanation


def test_the_gate_says_which_pod_breaks_a_draft_rule() -> None:
    prefill, decode = pair(mode="unified")
    decode = with_component(decode, "draft.swa_ring", rows_per_item=140)
    outcome = negotiate(prefill, decode)
    assert isinstance(outcome, Refusal)
    rules = [m for m in outcome.fatal if "must have" in m.explanation]
    assert [m.path for m in rules] == ["components[draft.swa_ring].rows_per_item"]
    assert rules[0].prefill_value == "as required"
    assert "131 rows" in rules[0].decode_value
    assert "140 rows" in rules[0].decode_value
    assert "on the decode pod" in rules[0].remedy


def test_a_row_is_as_large_as_its_shape_says() -> None:
    layout = with_entry(layout_of(SMALL, Pod()), "target.c4", 1, row_bytes=64)
    assert "entries[1].row_bytes: a row is as large as its shape" in problem(layout)
    other = replace(layout, geometry=replace(layout.geometry, byte_layout="block_scaled"))
    check_layout(other)  # another byte layout has its own arithmetic


def test_a_page_holds_exactly_its_tokens() -> None:
    assert "32 rows of 4 tokens in a page of 256 tokens" in problem(
        replace(
            layout_of(SMALL, Pod()),
            geometry=replace(layout_of(SMALL, Pod()).geometry, page_tokens=256),
        )
    )


def test_a_tail_divides_its_page() -> None:
    layout = with_component(layout_of(SMALL, Pod()), "target.c4_tail", rows_per_item=24)
    assert "24 rows in a page of 128 tokens" in problem(layout)


def test_the_stated_ring_is_the_rings_stride() -> None:
    layout = layout_of(SMALL, Pod(mode="unified"))
    wrong = replace(layout, geometry=replace(layout.geometry, ring_rows=128))
    assert "128, rings: target.swa_ring=131 draft.swa_ring=131" in problem(wrong)


@pytest.mark.parametrize("verify_tokens", [1, 2, 4, 8])
def test_rows_needed_is_the_shortest_stride_that_keeps_rows_apart(verify_tokens: int) -> None:
    """By brute force: live rows of L committed tokens and the T written beyond them, modulo stride."""
    layout = layout_of(Dims(ratios=(0, 4, 128, 4), hidden=8, window=16), Pod(mode="unified"))
    for component in layout.components:
        if component.space not in (Space.RING_ROW, Space.STATE_ROW):
            continue
        needed = rows_needed(component, verify_tokens)
        lengths = range(1, 3 * component.window_tokens + 3)
        assert all(fits(component, length, needed, verify_tokens) for length in lengths)
        assert not all(fits(component, length, needed - 1, verify_tokens) for length in lengths)


def fits(component: Component, length: int, stride: int, verify_tokens: int) -> bool:
    live = list(live_ordinals(component, length))
    if component.coverage.value == "window":
        live = live[-(component.window_tokens - 1) :]  # what the next token still reads
    rows = [row % stride for row in (*live, *range(length, length + verify_tokens))]
    return len(set(rows)) == len(rows)


def test_live_rows_bounds_every_prompt() -> None:
    for component in layout_of(SMALL, Pod()).components:
        if component.coverage.value != "history":
            most = max(len(live_ordinals(component, length)) for length in range(600))
            assert most == live_rows(component), component.name


def test_names_are_unique() -> None:
    layout = layout_of(SMALL, Pod(steps=0))
    doubled = replace(layout, components=(layout.components[0], *layout.components))
    assert "component names must be unique" in problem(doubled)


def test_a_component_has_one_entry_a_layer() -> None:
    entry = Entry(1, "float32", (32,), 128)
    layout = with_component(layout_of(SMALL, Pod()), "target.c4", entries=(entry, entry))
    assert "one entry a target layer at most" in problem(layout)
