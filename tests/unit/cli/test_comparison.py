"""Where two answers part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.cli.comparison import Answer, acceptance_length, compare, first_difference

_A = Answer((5, 6, 7, 8), (None, 2, 0), "length")


def test_equal_answers() -> None:
    assert compare(3, _A, _A).equal


@pytest.mark.parametrize(
    ("other", "token", "step", "reasons"),
    [
        (Answer((5, 6, 9, 8), (None, 2, 0), "length"), 2, None, None),
        (Answer((5, 6, 7), (None, 2, 0), "length"), 3, None, None),
        (Answer((5, 6, 7, 8), (None, 1, 1), "length"), None, 1, None),
        (Answer((5, 6, 7, 8), (None, 2), "length"), None, 2, None),
        (Answer((5, 6, 7, 8), (0, 2, 0), "length"), None, 0, None),
        (Answer((5, 6, 7, 8), (None, 2, 0), "stop"), None, None, ("length", "stop")),
    ],
)
def test_each_kind_of_difference_is_found(
    other: Answer, token: int | None, step: int | None, reasons: tuple[str, str] | None
) -> None:
    found = compare(3, _A, other)
    assert not found.equal
    assert (found.prompt, found.token, found.step, found.reasons) == (3, token, step, reasons)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_everything_before_the_first_difference_is_equal(a: list[int], b: list[int]) -> None:
    at = first_difference(a, b)
    if at is None:
        assert a == b
    else:
        assert a[:at] == b[:at]
        assert a[at : at + 1] != b[at : at + 1]


def test_acceptance_length_counts_verify_steps_only() -> None:
    assert acceptance_length([_A, Answer((1,), (None,), "stop")]) == 2.0
    assert acceptance_length([Answer((1,), (None,), "stop")]) == 0.0
