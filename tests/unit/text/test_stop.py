"""Stop strings: the cut is right and does not depend on chunking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.text.stop import Matched, StopMatcher

_TEXT = st.text("abc", max_size=30)
_STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def _by_character(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule itself, spelled out: stop at the first character that completes a stop string."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


def _streamed(
    pieces: list[str], stops: list[str], *, include: bool = False
) -> tuple[str, str | None]:
    matcher, out = StopMatcher(stops, include=include), ""
    for piece in pieces:
        matched = matcher.push(piece)
        out += matched.text
        if matched.stop is not None:
            return out, matched.stop
    return out + matcher.finish(), None


@given(st.lists(_TEXT, max_size=8), _STOPS)
def test_any_chunking_cuts_where_the_rule_says(pieces: list[str], stops: list[str]) -> None:
    assert _streamed(pieces, stops) == _by_character("".join(pieces), stops)


@given(st.lists(_TEXT, max_size=8), _STOPS)
def test_nothing_sent_is_ever_part_of_the_stop(pieces: list[str], stops: list[str]) -> None:
    matcher, sent, whole = StopMatcher(stops), "", "".join(pieces)
    expected, _ = _by_character(whole, stops)
    for piece in pieces:
        matched = matcher.push(piece)
        sent += matched.text
        assert expected.startswith(sent)
        if matched.stop is not None:
            return


def test_stop_across_three_pushes() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("one E") == Matched("one ")
    assert matcher.push("N") == Matched("")
    assert matcher.push("D two") == Matched("", "END")


@given(st.lists(_TEXT, max_size=8), _STOPS)
def test_included_the_stop_ends_the_text(pieces: list[str], stops: list[str]) -> None:
    text, stop = _by_character("".join(pieces), stops)
    assert _streamed(pieces, stops, include=True) == (text + (stop or ""), stop)


def test_held_text_comes_out_when_it_was_no_stop() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("EN") == Matched("")
    assert matcher.push("T") == Matched("ENT")
    assert matcher.push("E") == Matched("")
    assert matcher.finish() == "E"
    assert matcher.finish() == ""


def test_text_passes_at_once_without_stops() -> None:
    assert StopMatcher([]).push("abc") == Matched("abc")


def test_empty_stop_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        StopMatcher(["", "a"])
