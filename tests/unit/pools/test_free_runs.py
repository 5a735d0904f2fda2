"""Free runs stay sorted, maximal, and are handed out in one piece where possible."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.pools.free_runs import FreeRuns


def test_takes_ascending_from_the_front() -> None:
    runs = FreeRuns(1, 9)
    assert runs.take(3) == [1, 2, 3]
    assert runs.take(2) == [4, 5]
    assert list(runs) == [6, 7, 8]


def test_continues_behind_the_last_item() -> None:
    runs = FreeRuns(1, 20)
    runs.take(12)
    runs.give([3, 4, 5])
    assert runs.take(2, after=12) == [13, 14]
    assert runs.take(2) == [3, 4]
    assert runs.take(3, after=14) == [15, 16, 17]


def test_continues_as_far_as_it_can_then_takes_a_run_that_fits() -> None:
    runs = FreeRuns(1, 12)
    runs.take(11)
    runs.give([1, 5, 8, 9, 10])
    assert runs.take(3, after=4) == [5, 8, 9]


def test_prefers_a_run_that_fits_over_lower_fragments() -> None:
    runs = FreeRuns(1, 20)
    runs.take(19)
    runs.give([1, 4, 10, 11, 12])  # 1 also follows 0, which is nobody's item
    assert runs.take(3) == [10, 11, 12]


def test_uses_fragments_when_no_run_fits() -> None:
    runs = FreeRuns(1, 20)
    runs.take(19)
    runs.give([2, 4, 10, 11])
    assert runs.take(3) == [2, 10, 11]  # after 2, a run that fits the rest


def test_fragments_come_lowest_first() -> None:
    runs = FreeRuns(1, 20)
    runs.take(19)
    runs.give([9, 2, 4])
    assert runs.take(3) == [2, 4, 9]


def test_giving_back_merges_both_neighbours() -> None:
    runs = FreeRuns(1, 8)
    runs.take(7)
    for item in (3, 1, 2, 7, 5, 6, 4):
        runs.give([item])
    assert runs.take(7) == [1, 2, 3, 4, 5, 6, 7]


def test_a_filled_gap_makes_one_long_run() -> None:
    runs = FreeRuns(1, 10)
    runs.take(9)
    runs.give([1, 5, 7])
    runs.give([6])
    assert runs.take(3) == [5, 6, 7]


def test_an_empty_range_has_nothing() -> None:
    runs = FreeRuns(1, 1)
    assert len(runs) == 0
    assert list(runs) == []


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=40
    )
)
def test_behaves_like_a_set(steps: list[tuple[bool, int, int]]) -> None:
    runs, free, taken = FreeRuns(1, 31), set(range(1, 31)), list[int]()
    for is_take, count, after in steps:
        if is_take:
            got = runs.take(min(count, len(free)), after)
            assert len(set(got)) == len(got) == min(count, len(free))
            assert set(got) <= free
            free -= set(got)
            taken += got
        else:
            back, taken = taken[: count % 7], taken[count % 7 :]
            runs.give(back)
            free |= set(back)
        assert list(runs) == sorted(free)
        assert len(runs) == len(free)
