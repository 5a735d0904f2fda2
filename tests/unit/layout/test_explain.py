"""What people read: golden files, and the bytes against DeepSeek-V4's published dimensions.

To write the golden files anew after a wanted change: ``UPDATE_GOLDEN=1 pytest
tests/unit/layout/test_explain.py``.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.layout.columns import columns, layers, size
from sluice.layout.explain import cost_in_words, explain_layout, explain_outcome, moved
from sluice.layout.negotiate import negotiate
from tests.unit.layout.example_layouts import (
    FLASH,
    PRO,
    SMALL,
    Dims,
    Pod,
    layout_of,
    pair,
    with_component,
)

GOLDEN = Path(__file__).parent / "golden"
MIB = 1 << 20


def matches_golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("mode", ["paged", "unified"])
def test_a_layout_reads_well(mode: str) -> None:
    layout = layout_of(FLASH, Pod(mode=mode, kv_dtype="bfloat16"))
    matches_golden(f"layout_flash_{mode}", explain_layout(layout, 1000))


def test_a_layout_without_a_draft_says_so() -> None:
    text = explain_layout(layout_of(SMALL, Pod(steps=0)))
    assert "draft        none" in text
    assert "draft.swa" not in text
    assert "moves" not in text


def test_an_agreement_with_notes_reads_well() -> None:
    prefill, _ = pair(mode="unified")
    decode = layout_of(SMALL, Pod(mode="unified", steps=5, num_slots=9))
    matches_golden("agreed_other_strides", explain_outcome(negotiate(prefill, decode)))


def test_an_agreement_without_the_draft_reads_well() -> None:
    prefill = layout_of(SMALL, Pod("prefill", steps=0))
    outcome = negotiate(prefill, layout_of(SMALL, Pod()), allow_missing_draft=True)
    matches_golden("agreed_without_draft", explain_outcome(outcome))


def test_a_refusal_with_many_reasons_reads_well() -> None:
    prefill, _ = pair(FLASH)
    decode = layout_of(FLASH, Pod(mode="unified", kv_dtype="bfloat16", steps=0))
    ratios = (*FLASH.ratios[:20], 4, *FLASH.ratios[21:])
    decode = replace(
        decode,
        model=replace(decode.model, weights_digest="0badcafe"),
        geometry=replace(decode.geometry, compression_ratios=ratios),
    )
    matches_golden("refused_many_reasons", explain_outcome(negotiate(prefill, decode)))


def test_a_broken_draft_rule_reads_well() -> None:
    prefill, decode = pair(mode="unified")
    decode = with_component(decode, "draft.swa_ring", rows_per_item=140, num_items=9)
    matches_golden("refused_draft_geometry", explain_outcome(negotiate(prefill, decode)))


def test_no_line_of_an_outcome_is_wider_than_a_terminal() -> None:
    for path in GOLDEN.glob("refused_*.txt"):
        assert max(map(len, path.read_text().splitlines())) <= 100, path.name


# MiB a component for DeepSeek-V4 in bfloat16 with float32 tails, by prompt length: c4, c4_indexer, c128,
# window, c4_tail, c4_indexer_tail, c128_tail, draft window, draft hidden.
BYTES = [
    (FLASH, 1024, (5.25, 1.31, 0.16, 5.38, 0.66, 0.16, 0, 0.125, 0.03), 13.1),
    (FLASH, 8192, (42.0, 10.5, 1.25, 5.38, 0.66, 0.16, 0, 0.125, 0.03), 60.1),
    (FLASH, 131072, (672, 168, 20.0, 5.38, 0.66, 0.16, 0, 0.125, 0.03), 866),
    (PRO, 1024, (7.50, 1.88, 0.24, 7.62, 0.94, 0.23, 0, 0.125, 0.05), 18.6),
    (PRO, 8192, (60.0, 15.0, 1.94, 7.62, 0.94, 0.23, 0, 0.125, 0.05), 85.9),
    (PRO, 131072, (960, 240, 31.0, 7.62, 0.94, 0.23, 0, 0.125, 0.05), 1240),
    (FLASH, 1000, (5.13, 1.28, 0.14, 5.38, 0.66, 0.16, 8.125, 0.125, 0.03), 21.0),
    (PRO, 1000, (7.32, 1.83, 0.21, 7.62, 0.94, 0.23, 12.6, 0.125, 0.05), 30.9),
]


@pytest.mark.parametrize("mode", ["paged", "unified"])
@pytest.mark.parametrize(("dims", "length", "parts_mib", "total_mib"), BYTES)
def test_a_prompt_moves_the_bytes_that_the_models_dimensions_say(
    mode: str, dims: Dims, length: int, parts_mib: tuple[float, ...], total_mib: float
) -> None:
    parts = moved(layout_of(dims, Pod(mode=mode, kv_dtype="bfloat16")), length)
    for part, expected in zip(parts, parts_mib, strict=True):
        assert part.num_bytes / MIB == pytest.approx(expected, rel=0.01, abs=0.006), part.name
    assert sum(p.num_bytes for p in parts) / MIB == pytest.approx(total_mib, rel=0.004)


@pytest.mark.parametrize(("dims", "bytes_per_token"), [(FLASH, 6880), (PRO, 9848)])
def test_history_costs_what_is_published_per_token(dims: Dims, bytes_per_token: int) -> None:
    layout = layout_of(dims, Pod(kv_dtype="bfloat16"))
    history = [c for c in layout.components if c.coverage.value == "history"]
    assert sum(c.bytes_per_row / c.tokens_per_row for c in history) == bytes_per_token


def test_a_prefix_the_receiver_has_is_not_sent_again() -> None:
    layout = layout_of(SMALL, Pod())
    whole, rest = moved(layout, 1000), moved(layout, 1000, have=512)
    assert (whole[0].rows, rest[0].rows) == (250, 122)
    assert whole[3:] == rest[3:]  # windows and tails always travel whole


def test_costs_are_the_most_a_request_can_hold() -> None:
    layout = layout_of(FLASH, Pod(kv_dtype="bfloat16"))
    assert cost_in_words(layout.component("target.c128_tail")) == "9.92 MiB a request"
    assert cost_in_words(layout.component("target.c4")) == "5.25 KiB a token"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1024, "1 KiB"),
        (1 << 40, "1 TiB"),
        (1 << 60, "1.05e+06 TiB"),
    ],
)
def test_sizes_have_three_digits(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ((), "none"),
        ((3,), "3"),
        ((0, 1), "0 1"),
        ((0, 1, 2), "0-2"),
        ((2, 4, 6), "2-6 step 2"),
        ((0, 3, 4), "0 3 4"),
        ((0, 1, 3, 5, 7), "0, 1-7 step 2"),
        ((0, 1, 2, 4, 5, 6, 8, 9), "0-2, 4-6, 8, 9"),
        ((3, 7, 11, 14), "3-11 step 4, 14"),
        ((4, 3, 2), "4 3 2"),
        ((1, 1, 1), "1 1 1"),
    ],
)
def test_layer_ids_are_shortened(ids: tuple[int, ...], text: str) -> None:
    assert layers(ids) == text


def test_columns_line_up() -> None:
    assert columns([("a", "1"), ("long", "12")], right=frozenset({1})) == [
        "  a      1",
        "  long  12",
    ]
