"""An effect is attributed to its cause only when the cause's values lead to exactly its values."""

from __future__ import annotations

from dataclasses import replace

from sluice.layout.layout import Layout
from sluice.layout.negotiate import Refusal, negotiate
from tests.unit.layout.example_layouts import (
    SMALL,
    Pod,
    layout_of,
    pair,
    with_component,
    with_entry,
)


def causes(prefill: Layout, decode: Layout) -> dict[str, str]:
    outcome = negotiate(prefill, decode)
    assert isinstance(outcome, Refusal)
    return {m.path: m.cause for m in outcome.fatal}


def test_another_kv_type_explains_the_rows_that_have_it() -> None:
    prefill, _ = pair()
    found = causes(prefill, layout_of(SMALL, Pod(kv_dtype="bfloat16")))
    assert found["geometry.kv_dtype"] == ""
    assert found["components[target.c4].entries[*].dtype"] == "geometry.kv_dtype"
    assert found["components[target.c4].entries[*].row_bytes"] == "geometry.kv_dtype"


def test_another_kv_type_does_not_explain_a_tail_that_differs_in_its_own_way() -> None:
    prefill, _ = pair()
    decode = with_entry(
        layout_of(SMALL, Pod(kv_dtype="bfloat16")),
        "target.c4_tail",
        0,
        dtype="float16",
        row_bytes=256,
    )
    found = causes(prefill, decode)
    assert found["components[target.c4_tail].entries[0].dtype"] == ""
    assert found["components[target.c4_tail].entries[0].row_bytes"] == ""


def test_another_page_length_explains_rows_in_proportion_only() -> None:
    prefill, _ = pair()
    decode = layout_of(SMALL, Pod(page_tokens=256))
    odd = with_component(decode, "target.c128", rows_per_item=3)
    found = causes(prefill, odd)
    assert found["components[target.c4].rows_per_item"] == "geometry.page_tokens"
    outcome = negotiate(prefill, odd)
    path = "components[target.c128].rows_per_item"
    assert {m.cause for m in outcome.mismatches if m.path == path} == {""}  # type: ignore[union-attr]


def test_another_pool_mode_explains_spaces_and_names() -> None:
    found = causes(pair(mode="paged")[0], pair(mode="unified")[1])
    assert {path for path, cause in found.items() if not cause} == {"geometry.pool_mode"}
    assert found["components[target.c4_tail].space"] == "geometry.pool_mode"


def test_nothing_is_attributed_to_a_cause_that_is_not_there() -> None:
    prefill, decode = pair()
    found = causes(prefill, with_entry(decode, "target.c4", 0, dtype="float16", row_bytes=64))
    assert set(found.values()) == {""}


def test_a_model_difference_hides_nothing() -> None:
    prefill, decode = pair()
    decode = replace(decode, model=replace(decode.model, weights_digest="other"))
    assert causes(prefill, decode) == {"model.weights_digest": ""}
