"""The gate: what agrees, what is refused and under which name, and that both sides compute the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.errors import LayoutRefused
from sluice.layout.component import Component, Coverage, Entry, Kind, Owner, Space
from sluice.layout.encoding import decode, encode
from sluice.layout.explain import explain_outcome
from sluice.layout.layout import Geometry, Layout, ModelIdentity, Parallelism, SpecIdentity
from sluice.layout.negotiate import Agreement, DraftHandover, Refusal, Severity, negotiate
from sluice.layout.rules import RULES, rule_for
from tests.unit.layout.example_layouts import (
    FLASH,
    SMALL,
    Dims,
    Pod,
    layout_of,
    pair,
    with_component,
    with_entry,
)
from tests.unit.layout.strategies import layouts

Mutation = Callable[[Layout], Layout]
LAYOUT_TYPES = (Layout, ModelIdentity, Geometry, Parallelism, SpecIdentity, Component, Entry)


def agree(prefill: Layout, decode: Layout, **flags: bool) -> Agreement:
    outcome = negotiate(prefill, decode, **flags)
    assert isinstance(outcome, Agreement), outcome
    return outcome


def refuse(prefill: Layout, decode: Layout, **flags: bool) -> Refusal:
    outcome = negotiate(prefill, decode, **flags)
    assert isinstance(outcome, Refusal), outcome
    return outcome


@pytest.mark.parametrize("mode", ["paged", "unified"])
@pytest.mark.parametrize("dims", [SMALL, FLASH])
def test_pods_built_alike_agree_on_every_component_in_order(mode: str, dims: Dims) -> None:
    prefill, decode_ = pair(dims, mode=mode)
    agreement = agree(prefill, decode_)
    suffix = "_ring" if mode == "unified" else ""
    assert agreement.components == (
        "target.c4",
        "target.c4_indexer",
        "target.c128",
        f"target.swa{suffix}",
        "target.c4_tail",
        "target.c4_indexer_tail",
        "target.c128_tail",
        f"draft.swa{suffix}",
        "draft.hidden",
    )
    assert agreement.draft is DraftHandover.SENT
    assert agreement.draft_valid
    assert agreement.notes == ()


def test_a_plan_holds_each_pods_own_component() -> None:
    prefill, decode_ = pair()
    decode_ = with_component(decode_, "target.c4", num_items=7)
    plan = agree(prefill, decode_).plans[0]
    assert (plan.prefill.num_items, plan.decode.num_items) == (65, 7)


def test_the_digest_is_the_same_whoever_computes_it() -> None:
    prefill, decode_ = pair(mode="unified")
    decode_ = replace(layout_of(SMALL, Pod(mode="unified", steps=5)), role="decode")
    over_the_wire = decode(encode(prefill)), decode(encode(decode_))
    assert agree(prefill, decode_).digest == agree(*over_the_wire).digest


def test_the_digest_ignores_capacities_and_tells_agreements_apart() -> None:
    prefill, decode_ = pair()
    digest = agree(prefill, decode_).digest
    assert agree(*pair(num_pages=9, num_slots=5, num_window_pages=11)).digest == digest
    assert agree(*pair(mode="unified")).digest != digest
    assert agree(*pair(steps=2)).digest != digest
    assert agree(*pair(FLASH)).digest != digest


def test_every_field_of_a_layout_has_a_rule() -> None:
    """A new field without a rule would not be compared: decide about it in ``layout.rules``."""
    containers = {
        ("Layout", "model"),
        ("Layout", "geometry"),
        ("Layout", "parallelism"),
        ("Layout", "spec"),
        ("Layout", "components"),
        ("Component", "entries"),
    }
    wanted = {
        f"{kind.__name__}.{field.name}"
        for kind in LAYOUT_TYPES
        for field in fields(kind)
        if (kind.__name__, field.name) not in containers
    }
    assert wanted == set(RULES)
    assert all(is_dataclass(kind) for kind in LAYOUT_TYPES)
    with pytest.raises(KeyError):
        rule_for(Layout, "colour")


def _model(**changes: Any) -> Mutation:
    return lambda layout: replace(layout, model=replace(layout.model, **changes))


def _geometry(**changes: Any) -> Mutation:
    return lambda layout: replace(layout, geometry=replace(layout.geometry, **changes))


def _parallelism(**changes: Any) -> Mutation:
    return lambda layout: replace(layout, parallelism=replace(layout.parallelism, **changes))


def _spec(**changes: Any) -> Mutation:
    return lambda layout: replace(layout, spec=replace(layout.spec, **changes))


def _component(name: str, /, **changes: Any) -> Mutation:
    return lambda layout: with_component(layout, name, **changes)


def _entry(name: str, index: int, /, **changes: Any) -> Mutation:
    return lambda layout: with_entry(layout, name, index, **changes)


def _swapped(layout: Layout) -> Layout:
    first, second, *rest = layout.components
    return replace(layout, components=(second, first, *rest))


def _without(name: str) -> Mutation:
    return lambda layout: replace(
        layout, components=tuple(c for c in layout.components if c.name != name)
    )


def _all_dtypes(layout: Layout) -> Layout:
    c4 = layout.component("target.c4")
    entries = tuple(replace(e, dtype="int32") for e in c4.entries)
    return with_component(layout, "target.c4", entries=entries)


FATAL_MUTATIONS: tuple[tuple[str, Mutation], ...] = (
    ("wire_version", lambda layout: replace(layout, wire_version=99)),
    ("model.architecture", _model(architecture="LlamaForCausalLM")),
    ("model.config_digest", _model(config_digest="x")),
    ("model.weights_digest", _model(weights_digest="x")),
    ("model.tokenizer_digest", _model(tokenizer_digest="x")),
    ("geometry.page_tokens", _geometry(page_tokens=256)),
    ("geometry.window_tokens", _geometry(window_tokens=64)),
    ("geometry.compression_ratios", _geometry(compression_ratios=(0, 4, 128, 128))),
    ("geometry.pool_mode", _geometry(pool_mode="unified")),
    ("geometry.ring_rows", _geometry(ring_rows=131)),
    ("geometry.kv_dtype", _geometry(kv_dtype="bfloat16")),
    ("geometry.byte_layout", _geometry(byte_layout="block_scaled")),
    ("spec.algorithm", _spec(algorithm="dspark")),
    ("spec.algorithm", _spec(algorithm="none")),
    ("spec.draft_digest", _spec(draft_digest="x")),
    ("spec.draft_ratios", _spec(draft_ratios=(0, 0))),
    ("spec.draft_ratios", _spec(draft_ratios=(4,))),
    ("components[target.c4_tail].rows_per_item", _spec(draft_tokens=10)),
    ("components", _swapped),
    ("components[target.c4]", _without("target.c4")),
    ("components[target.c4]", _component("target.c4", name="target.c5")),
    ("components[draft.hidden]", _without("draft.hidden")),
    ("components[target.c4].owner", _component("target.c4", owner=Owner.DRAFT)),
    ("components[target.c4].kind", _component("target.c4", kind=Kind.C128)),
    ("components[target.c4].space", _component("target.c4", space=Space.WINDOW_PAGE)),
    ("components[target.c4].coverage", _component("target.c4", coverage=Coverage.WINDOW)),
    ("components[target.c4].tokens_per_row", _component("target.c4", tokens_per_row=8)),
    ("components[target.c4].rows_per_item", _component("target.c4", rows_per_item=64)),
    ("components[target.swa].rows_per_item", _component("target.swa", rows_per_item=64)),
    ("components[target.swa].window_tokens", _component("target.swa", window_tokens=64)),
    ("components[target.c4_tail].window_tokens", _component("target.c4_tail", window_tokens=3)),
    ("components[target.c4].entries", _component("target.c4", entries=())),
    ("components[target.c4].entries[1].layer_id", _entry("target.c4", 1, layer_id=2)),
    ("components[target.c4].entries[1].dtype", _entry("target.c4", 1, dtype="bfloat16")),
    ("components[target.c4].entries[*].dtype", _all_dtypes),
    ("components[target.c4].entries[0].row_shape", _entry("target.c4", 0, row_shape=(2, 16))),
    ("components[target.c4].entries[0].row_bytes", _entry("target.c4", 0, row_bytes=64)),
    ("components[target.c4].entries[0].shard_axis", _entry("target.c4", 0, shard_axis=0)),
    ("components[draft.swa].entries[0].dtype", _entry("draft.swa", 0, dtype="bfloat16")),
    ("components[draft.hidden].rows_per_item", _component("draft.hidden", rows_per_item=2)),
)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("path", "mutate"),
    FATAL_MUTATIONS,
    ids=[f"{i}-{p}" for i, (p, _) in enumerate(FATAL_MUTATIONS)],
)
def test_a_changed_field_is_refused_by_name(side: str, path: str, mutate: Mutation) -> None:
    prefill, decode_ = pair()
    if side == "prefill":
        prefill = mutate(prefill)
    else:
        decode_ = mutate(decode_)
    # A prefill pod verifies nothing, so a number of verified tokens of its own asks nothing of it.
    if side == "prefill" and path == "components[target.c4_tail].rows_per_item":
        agree(prefill, decode_)
        return
    refusal = refuse(prefill, decode_)
    assert path in {m.path for m in refusal.fatal}
    assert path.partition("[")[0] in str(refusal.error())
    named = [m for m in refusal.mismatches if m.path == path]
    assert all(m.prefill_value != m.decode_value for m in named)
    assert all(m.explanation for m in refusal.mismatches)


NOTED_MUTATIONS: tuple[tuple[str, Severity, Mutation], ...] = (
    ("role", Severity.HARMLESS, lambda layout: replace(layout, role="aggregated")),
    ("parallelism.rank", Severity.HARMLESS, _parallelism(rank=1)),
    ("components[target.c4].num_items", Severity.HARMLESS, _component("target.c4", num_items=3)),
    ("spec.steps", Severity.CONVERTIBLE, _spec(steps=2)),
    ("parallelism.tensor", Severity.CONVERTIBLE, _parallelism(tensor=2)),
    ("spec.draft_tokens", Severity.CONVERTIBLE, _spec(draft_tokens=3)),
    (
        "components[target.c4_tail].rows_per_item",
        Severity.CONVERTIBLE,
        _component("target.c4_tail", rows_per_item=32),
    ),
    (
        "components[target.c128_tail].rows_per_item",
        Severity.CONVERTIBLE,
        _component("target.c128_tail", rows_per_item=256),
    ),
)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(("path", "severity", "mutate"), NOTED_MUTATIONS)
def test_a_difference_that_does_not_matter_is_noted(
    side: str, path: str, severity: Severity, mutate: Mutation
) -> None:
    prefill, decode_ = pair()
    if side == "prefill":
        prefill = mutate(prefill)
    else:
        decode_ = mutate(decode_)
    notes = {m.path: m.severity for m in agree(prefill, decode_).notes}
    assert notes == {path: severity}


def test_window_rings_of_different_stride_agree() -> None:
    prefill, _ = pair(mode="unified", steps=3)
    _, decode_ = pair(mode="unified", steps=5)
    notes = {m.path: (m.prefill_value, m.decode_value) for m in agree(prefill, decode_).notes}
    assert notes["geometry.ring_rows"] == ("131", "133")
    assert notes["components[target.swa_ring].rows_per_item"] == ("131", "133")
    assert notes["components[draft.swa_ring].rows_per_item"] == ("131", "133")


@pytest.mark.parametrize(
    ("component", "rows"),
    [("target.swa_ring", 130), ("target.c128_tail", 130), ("target.c4_tail", 8)],
)
def test_a_decode_ring_too_short_for_its_verify_width_is_refused(component: str, rows: int) -> None:
    prefill, decode_ = pair(mode="unified")
    short = with_component(decode_, component, rows_per_item=rows)
    fatal = {m.path: m for m in refuse(prefill, short).fatal}
    mismatch = fatal[f"components[{component}].rows_per_item"]
    assert f"{rows} rows" in mismatch.decode_value
    assert "4 tokens verified" in mismatch.decode_value


def test_the_same_short_ring_is_long_enough_for_prefill() -> None:
    prefill, decode_ = pair(mode="unified")
    prefill = with_component(prefill, "target.c128_tail", rows_per_item=128)
    agree(prefill, decode_)
    refuse(with_component(prefill, "target.c128_tail", rows_per_item=127), decode_)


def test_a_different_pool_mode_explains_the_missing_window() -> None:
    prefill, _ = pair(mode="paged")
    _, decode_ = pair(mode="unified")
    fatal = {m.path: m for m in refuse(prefill, decode_).fatal}
    assert fatal["geometry.pool_mode"].remedy == (
        "set SLUICE_DECODE_POOL_MODE=paged on the decode pod, or SLUICE_PREFILL_POOL_MODE=unified "
        "on the prefill pod"
    )
    assert fatal["components[target.swa]"].decode_value == "absent"
    assert fatal["components[target.swa]"].explanation == "follows from geometry.pool_mode"
    assert fatal["components[target.swa_ring]"].prefill_value == "absent"


def test_every_difference_is_listed_not_only_the_first() -> None:
    prefill, decode_ = pair()
    decode_ = _model(weights_digest="x")(_geometry(page_tokens=256)(decode_))
    paths = {m.path for m in refuse(prefill, decode_).mismatches}
    assert {"model.weights_digest", "geometry.page_tokens"} <= paths


def test_more_layers_on_one_side_still_compares_the_common_ones() -> None:
    prefill, decode_ = pair()
    decode_ = _entry("target.c4", 1, row_bytes=9)(decode_)
    shorter = with_component(
        prefill, "target.c4", entries=prefill.component("target.c4").entries[1:]
    )
    paths = {m.path for m in refuse(shorter, decode_).fatal}
    assert {"components[target.c4].entries", "components[target.c4].entries[0].row_bytes"} <= paths


def test_a_refusal_becomes_an_error_with_both_values_and_a_remedy() -> None:
    prefill, decode_ = pair()
    error = refuse(prefill, _geometry(kv_dtype="bfloat16")(decode_)).error()
    assert isinstance(error, LayoutRefused)
    assert "geometry.kv_dtype: prefill float32, decode bfloat16" in str(error)
    assert "SLUICE_DECODE_KV_DTYPE=float32 on the decode pod" in error.remedy


def test_swapping_the_pods_swaps_the_values_and_nothing_else() -> None:
    one, other = pair()
    for path, mutate in FATAL_MUTATIONS:
        changed = mutate(other)
        if path == "components[target.c4_tail].rows_per_item":
            continue  # a rule for decode pods only
        there = refuse(one, replace(changed, role="decode"))
        back = refuse(replace(changed, role="prefill"), replace(one, role="decode"))
        assert sorted(
            (m.path, m.severity.value, m.prefill_value, m.decode_value) for m in there.mismatches
        ) == sorted(
            (m.path, m.severity.value, m.decode_value, m.prefill_value) for m in back.mismatches
        )


@settings(max_examples=60)
@given(layouts, layouts, st.booleans())
def test_whatever_a_peer_sends_there_is_an_outcome(one: Layout, other: Layout, allow: bool) -> None:
    """The other pod's layout comes from the network: no value in it may raise out of the gate."""
    for decode_ in (one, other, layout_of(SMALL, Pod())):
        outcome = negotiate(one, decode_, allow_missing_draft=allow)
        assert explain_outcome(outcome)
        if isinstance(outcome, Refusal):
            assert outcome.fatal
            assert outcome.summary()
