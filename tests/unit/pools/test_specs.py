"""Needs become components: space, rows an item and names by pool mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.config import PoolMode
from sluice.errors import ConfigError, GeometryError
from sluice.layout.component import Kind, Space
from sluice.pools.specs import components_of
from tests.unit.pools.dsv4_needs import VERIFY_TOKENS, config, needs, target_needs


def shape(mode: PoolMode) -> list[tuple[str, Kind, Space, int, int]]:
    return [
        (c.name, c.kind, c.space, c.rows_per_item, c.num_items)
        for c in components_of(needs(), config(mode), VERIFY_TOKENS)
    ]


def test_paged_mode() -> None:
    assert shape(PoolMode.PAGED) == [
        ("target.c4", Kind.C4, Space.PAGE, 32, 25),
        ("target.c4_indexer", Kind.C4_INDEXER, Space.PAGE, 32, 25),
        ("target.c128", Kind.C128, Space.PAGE, 1, 25),
        ("target.swa", Kind.SWA, Space.WINDOW_PAGE, 128, 11),
        ("target.c4_tail", Kind.C4_TAIL, Space.WINDOW_PAGE, 16, 11),
        ("target.c4_indexer_tail", Kind.C4_INDEXER_TAIL, Space.WINDOW_PAGE, 16, 11),
        ("target.c128_tail", Kind.C128_TAIL, Space.STATE_ROW, 131, 5),
        ("draft.swa", Kind.SWA, Space.WINDOW_PAGE, 128, 11),
        ("draft.hidden", Kind.HIDDEN, Space.REQUEST_SLOT, 1, 5),
    ]


def test_unified_mode() -> None:
    assert shape(PoolMode.UNIFIED) == [
        ("target.c4", Kind.C4, Space.PAGE, 32, 25),
        ("target.c4_indexer", Kind.C4_INDEXER, Space.PAGE, 32, 25),
        ("target.c128", Kind.C128, Space.PAGE, 1, 25),
        ("target.swa_ring", Kind.SWA_RING, Space.RING_ROW, 19, 5),
        ("target.c4_tail", Kind.C4_TAIL, Space.STATE_ROW, 16, 5),
        ("target.c4_indexer_tail", Kind.C4_INDEXER_TAIL, Space.STATE_ROW, 16, 5),
        ("target.c128_tail", Kind.C128_TAIL, Space.STATE_ROW, 131, 5),
        ("draft.swa_ring", Kind.SWA_RING, Space.RING_ROW, 19, 5),
        ("draft.hidden", Kind.HIDDEN, Space.REQUEST_SLOT, 1, 5),
    ]


def test_entries_carry_layer_dtype_and_bytes() -> None:
    hidden = components_of(needs(), config(PoolMode.PAGED), VERIFY_TOKENS)[-1]
    (entry,) = hidden.entries
    assert (entry.layer_id, entry.dtype, entry.row_shape, entry.row_bytes) == (
        5,
        "bfloat16",
        (2, 5),
        20,
    )


@pytest.mark.parametrize("mode", PoolMode)
@pytest.mark.parametrize(("page_tokens", "culprit"), [(64, "c128"), (2, "c4"), (192, "c128")])
def test_a_page_holds_whole_rows(mode: PoolMode, page_tokens: int, culprit: str) -> None:
    with pytest.raises(GeometryError, match=rf"target\.{culprit}: a page of {page_tokens} tokens"):
        components_of(needs(), config(mode, page_tokens=page_tokens), VERIFY_TOKENS)


@pytest.mark.parametrize("mode", PoolMode)
def test_a_page_holds_whole_tail_rings(mode: PoolMode) -> None:
    tails = [spec for spec in target_needs() if spec.name == "target.c4_tail"]
    with pytest.raises(GeometryError, match=r"target\.c4_tail: a page of 8 tokens .* of 16"):
        components_of(tails, config(mode, page_tokens=8), VERIFY_TOKENS)
    components_of(tails, config(mode, page_tokens=8), 1)  # 8 rows without speculation


def test_names_are_unique() -> None:
    with pytest.raises(GeometryError, match="names must be unique"):
        components_of([*needs(), needs()[0]], config(PoolMode.PAGED), 1)


def test_window_state_has_one_token_a_row() -> None:
    wrong = replace(target_needs()[3], tokens_per_row=4)
    with pytest.raises(GeometryError, match=r"target\.swa: window state has one token a row"):
        components_of([wrong], config(PoolMode.PAGED), 1)


@pytest.mark.parametrize("change", [{"layer_ids": ()}, {"row_shape": (0,)}])
def test_empty_state_is_refused(change: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(GeometryError, match=r"target\.c4 has layers"):
        components_of([replace(needs()[0], **change)], config(PoolMode.PAGED), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["page_tokens", "num_pages", "num_window_pages", "num_slots"])
def test_counts_are_positive(field: str) -> None:
    settings = replace(config(PoolMode.PAGED), **{field: 0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{field} is 0, must be at least 1"):
        components_of(needs(), settings, 1)


def test_at_least_the_newest_token_is_verified() -> None:
    with pytest.raises(ConfigError, match="verify_tokens is 0"):
        components_of(needs(), config(PoolMode.PAGED), 0)


def test_unified_mode_needs_no_window_pages() -> None:
    components_of(needs(), config(PoolMode.UNIFIED, num_window_pages=0), VERIFY_TOKENS)
