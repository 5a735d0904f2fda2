"""Saved layouts come back equal, and the fingerprint changes with everything the gate compares."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings

from sluice.errors import ConfigError
from sluice.layout.encoding import decode, encode, fingerprint
from sluice.layout.layout import Layout
from tests.unit.layout.example_layouts import SMALL, Pod, layout_of, with_component, with_entry
from tests.unit.layout.strategies import layouts


@settings(max_examples=50)
@given(layouts)
def test_a_layout_survives_saving_and_loading(layout: Layout) -> None:
    assert decode(encode(layout)) == layout
    assert decode(encode(layout, indent=2)) == layout


@settings(max_examples=50)
@given(layouts, layouts)
def test_text_and_fingerprint_are_functions_of_the_layout(one: Layout, other: Layout) -> None:
    assert (encode(one) == encode(other)) == (one == other)
    assert encode(decode(encode(one, indent=2))) == encode(one)
    assert fingerprint(decode(encode(one))) == fingerprint(one)


def test_the_fingerprint_is_pinned() -> None:
    """Two releases that hash differently would refuse one another: raise the version when it must."""
    assert (
        fingerprint(layout_of(SMALL, Pod()))
        == "2dfb65ba0bd8666389dd575768f0c68269b38d7ca8cad73b58f6058a5f018990"
    )


def test_capacity_role_and_rank_are_not_in_the_fingerprint() -> None:
    layout = layout_of(SMALL, Pod())
    same = replace(
        with_component(layout, "target.c4", num_items=9),
        role="prefill",
        parallelism=replace(layout.parallelism, rank=3),
    )
    assert fingerprint(same) == fingerprint(layout)


def test_what_the_gate_compares_is_in_the_fingerprint() -> None:
    layout = layout_of(SMALL, Pod())
    changed = (
        replace(layout, wire_version=99),
        replace(layout, model=replace(layout.model, tokenizer_digest="x")),
        replace(layout, geometry=replace(layout.geometry, ring_rows=7)),
        replace(layout, parallelism=replace(layout.parallelism, tensor=2)),
        replace(layout, spec=replace(layout.spec, steps=2)),
        replace(layout, components=layout.components[:-1]),
        replace(layout, components=layout.components[::-1]),
        with_component(layout, "target.c4", rows_per_item=7),
        with_entry(layout, "draft.swa", 0, row_bytes=7),
    )
    assert len({fingerprint(one) for one in (layout, *changed)}) == len(changed) + 1


def broken(change: str) -> str:
    """One saved layout with one thing about it spoilt."""
    document = json.loads(encode(layout_of(SMALL, Pod())))
    layout = document["layout"]
    match change:
        case "format":
            document["format"] = "something"
        case "version":
            document["version"] = 2
        case "no layout":
            document["layout"] = None
        case "unknown":
            layout["geometry"]["colour"] = 1
        case "missing":
            del layout["components"][0]["entries"][1]["dtype"]
        case "type":
            layout["geometry"]["page_tokens"] = "128"
        case "bool":
            layout["spec"]["steps"] = True
        case "enum":
            layout["components"][3]["space"] = "ELSEWHERE"
        case "list":
            layout["components"] = {}
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("format", '"format": "sluice-layout"'),
        ("version", "version 2, this release reads 1"),
        ("no layout", "layout is None"),
        ("unknown", "layout.geometry has unknown fields: colour"),
        ("missing", r"layout.components[0].entries[1] lacks: dtype"),
        ("type", "layout.geometry.page_tokens is '128', not of type int"),
        ("bool", "layout.spec.steps is True"),
        ("enum", r"layout.components[3].space is 'ELSEWHERE', not one of PAGE"),
        ("list", "layout.components is {}, not a list"),
    ],
)
def test_a_spoilt_file_is_refused_by_the_field_that_does_not_fit(change: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(broken(change))
    assert named in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"text"'])
def test_what_is_not_a_layout_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a readable layout file"):
        decode(text)
