"""Scales as components: where they must stand, and one changed number format as one difference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.errors import GeometryError
from sluice.layout.component import Component, Kind
from sluice.layout.consistency import check_layout
from sluice.layout.layout import Layout
from sluice.layout.negotiate import negotiate
from sluice.layout.outcome import Agreement, Refusal
from tests.unit.layout.example_layouts import SMALL, Pod, layout_of, pair

VALUES = "target.c4"
SCALE = f"{VALUES}.scale"
FORMAT, BYTES = "geometry.kv_dtype", "geometry.byte_layout"


def scaled(layout: Layout) -> Layout:
    """The layout with one block-scaled component, as if a family of that kind had asked for mxfp8."""
    parts: list[Component] = []
    for part in layout.components:
        if part.name != VALUES:
            parts.append(part)
            continue
        values = tuple(
            replace(e, dtype="float8_e4m3fn", row_bytes=e.row_shape[0]) for e in part.entries
        )
        scales = tuple(
            replace(e, dtype="float8_e8m0fnu", row_bytes=1, row_shape=(1,)) for e in part.entries
        )
        parts.append(replace(part, entries=values))
        parts.append(replace(part, name=SCALE, kind=Kind.BLOCK_SCALE, entries=scales))
    geometry = replace(layout.geometry, kv_dtype="mxfp8", byte_layout="rows+ue8m0/32")
    return replace(layout, geometry=geometry, components=tuple(parts))


def changed(layout: Layout, **changes: object) -> Layout:
    """With its scales' component changed."""
    parts = tuple(replace(c, **changes) if c.name == SCALE else c for c in layout.components)  # type: ignore[arg-type]
    return replace(layout, components=parts)


def problem(layout: Layout) -> str:
    with pytest.raises(GeometryError) as error:
        check_layout(layout)
    return str(error.value)


def causes(prefill: Layout, decode: Layout) -> dict[str, str]:
    outcome = negotiate(prefill, decode)
    assert isinstance(outcome, Refusal)
    return {m.path: m.cause for m in outcome.fatal}


def test_scales_are_sent_right_after_their_values() -> None:
    prefill, decode = map(scaled, pair())
    check_layout(prefill)
    outcome = negotiate(prefill, decode)
    assert isinstance(outcome, Agreement)
    assert [plan.name for plan in outcome.plans][:2] == [VALUES, SCALE]


@pytest.mark.parametrize("changes", [{"num_items": 3}, {"window_tokens": 4}])
def test_scales_that_count_rows_another_way_are_refused(changes: dict[str, int]) -> None:
    text = problem(changed(scaled(layout_of(SMALL, Pod())), **changes))
    assert f"components[{SCALE}]: scales come right after" in text


def test_scales_of_other_layers_are_refused() -> None:
    layout = scaled(layout_of(SMALL, Pod()))
    (scales,) = (c for c in layout.components if c.name == SCALE)
    text = problem(changed(layout, entries=scales.entries[:-1]))
    assert f"components[{SCALE}]: scales come right after" in text


@pytest.mark.parametrize("place", [0, 3])
def test_scales_in_another_place_are_refused(place: int) -> None:
    layout = scaled(layout_of(SMALL, Pod()))
    parts = [c for c in layout.components if c.name != SCALE]
    parts.insert(place, next(c for c in layout.components if c.name == SCALE))
    found = problem(replace(layout, components=tuple(parts)))
    assert f"found after {parts[place - 1].name if place else 'nothing'}" in found


def test_scales_of_scales_are_refused() -> None:
    layout = scaled(layout_of(SMALL, Pod()))
    (scales,) = (c for c in layout.components if c.name == SCALE)
    parts = list(layout.components)
    parts.insert(2, replace(scales, name=f"{SCALE}.scale"))
    assert f"components[{SCALE}.scale]" in problem(replace(layout, components=tuple(parts)))


def test_block_scaled_rows_are_as_large_as_their_shape_says_too() -> None:
    layout = scaled(layout_of(SMALL, Pod()))
    (scales,) = (c for c in layout.components if c.name == SCALE)
    wider = tuple(replace(entry, row_bytes=4) for entry in scales.entries)
    assert "a row is as large as its shape" in problem(changed(layout, entries=wider))


def test_one_changed_format_is_one_difference() -> None:
    prefill, decode = pair()
    found = causes(scaled(prefill), decode)
    assert [path for path, cause in found.items() if not cause] == [FORMAT]
    assert {BYTES, f"components[{SCALE}]"} < set(found)
    assert found == causes(prefill, scaled(decode))


def test_a_format_does_not_explain_a_byte_layout_of_another_kind() -> None:
    prefill, decode = pair()
    decode = replace(decode, geometry=replace(decode.geometry, byte_layout="tiled"))
    found = causes(scaled(prefill), decode)
    assert found[BYTES] == ""
    assert found[f"components[{VALUES}].entries[*].dtype"] == ""


def test_scales_missing_under_one_format_stand_by_themselves() -> None:
    prefill, decode = map(scaled, pair())
    parts = tuple(c for c in decode.components if c.name != SCALE)
    assert causes(prefill, replace(decode, components=parts)) == {f"components[{SCALE}]": ""}
