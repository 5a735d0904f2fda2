"""The grid against counting token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ConfigError
from sluice.models.snapshots import Crossing, SnapshotGrid

GRID = SnapshotGrid(interval_tokens=8, page_tokens=4, verify_tokens=5)


@given(length=st.integers(0, 100), commit_len=st.integers(-1, 5))
def test_a_crossing_is_the_one_depth_among_committed_tokens(length: int, commit_len: int) -> None:
    depths = [d for d in range(length + 1, length + commit_len + 1) if d % 8 == 0]
    found = GRID.crossing(length, commit_len)
    assert found == (Crossing(depths[0], depths[0] - length) if depths else None)
    assert len(depths) <= 1
    if found is not None:
        assert 1 <= found.tokens <= commit_len  # never a state that saw a rejected token


@given(start=st.integers(0, 60), size=st.integers(1, 40))
def test_chunks_cut_at_every_depth_cover_the_prompt(start: int, size: int) -> None:
    at, seen = start, []
    while at < start + size:
        stop = GRID.chunk_stop(at, start + size)
        assert stop > at
        seen.append(stop)
        at = stop
    assert [d for d in seen if d % 8 == 0] == [
        d for d in range(start + 1, start + size + 1) if d % 8 == 0
    ]


def test_the_depth_that_rejected_drafts_would_reach_is_none() -> None:
    assert GRID.crossing(6, 1) is None
    assert GRID.crossing(6, 2) == Crossing(8, 2)
    assert GRID.crossing(8, 1) is None
    assert GRID.deepest(15) == 8


@pytest.mark.parametrize(
    ("interval", "says"),
    [(4, "could cross two depths"), (10, "multiple of a page"), (0, "0 tokens")],
)
def test_grids_that_do_not_work(interval: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SnapshotGrid(interval_tokens=interval, page_tokens=4, verify_tokens=5)
