"""A matcher allows exactly what continues its grammar, and drafts leave it where it was."""

from __future__ import annotations

import re

import pytest
from llguidance import LLMatcher, LLParserLimits
from torch import Tensor

from sluice.errors import BadRequest, InternalError
from sluice.grammar.matcher import GrammarMatcher, Matcher
from sluice.types import Grammar, GrammarKind
from tests.unit.grammar.letters import EOS, TEXTS, letters, load_letters

A, B, C, AB, BC, ZERO, ONE = range(1, 8)


def _matcher(regex: str) -> Matcher:
    return letters().matcher(Grammar(GrammarKind.REGEX, regex))


def _ids(mask_V: Tensor) -> set[int]:
    return set(mask_V.nonzero()[:, 0].tolist())


def test_each_row_allows_what_may_follow_the_drafts_before_it() -> None:
    matcher = _matcher("(a|b)+c?")
    rows = [_ids(row) for row in matcher.allowed([A, AB, C])]
    some = {A, B, AB, C, BC, EOS}
    assert rows == [{A, B, AB, BC}, some, some, {EOS}]


def test_drafts_leave_the_matcher_where_it_was() -> None:
    matcher = _matcher("[ab]{3}c")
    before = matcher.allowed([])
    for drafts in ([A], [A, B, A], [A, B, A, C, EOS], [C], [A, EOS, A], [ONE, A]):
        matcher.allowed(drafts)
        assert matcher.allowed([]).equal(before)


@pytest.mark.parametrize("drafts", [[ONE, A], [A, ONE, B], [EOS, A]])
def test_rows_behind_a_draft_that_leaves_the_grammar_do_not_matter(drafts: list[int]) -> None:
    matcher = _matcher("[ab]{5}")
    rows = matcher.allowed(drafts)
    assert rows[-1].all()
    assert not rows[0].all()
    assert matcher.failure is None


def test_each_token_of_the_output_counts_once() -> None:
    matcher, output = _matcher("abc"), [A]
    for _ in range(3):
        matcher.follow(output)
        assert _ids(matcher.allowed([])[0]) == {BC}  # as the tokenizer spells it
    output.append(BC)
    matcher.follow(output)
    assert _ids(matcher.allowed([])[0]) == {EOS}


@pytest.mark.parametrize(("regex", "output"), [("(a|b)*c", [A, C]), ("(a|b)*", [A, EOS])])
def test_the_end_of_a_grammar_allows_its_end_only(regex: str, output: list[int]) -> None:
    matcher = _matcher(regex)
    matcher.follow(output)
    assert _ids(matcher.allowed([])[0]) == {EOS}
    assert matcher.failure is None


def test_every_spelling_that_is_allowed_matches_in_the_end() -> None:
    """Walks all outputs of up to four tokens and compares with Python's own regular expressions."""
    regex = "(ab|bc){1,2}0?"
    found, open_ends = set(), [[]]
    while open_ends:
        output: list[int] = open_ends.pop()
        matcher = _matcher(regex)
        matcher.follow(output)
        for token in _ids(matcher.allowed([])[0]):
            if token == EOS:
                found.add("".join(TEXTS[i] for i in output))
            elif len(output) < 6:
                open_ends.append([*output, token])
    words = [a + b + z for a in ("ab", "bc") for b in ("", "ab", "bc") for z in ("", "0")]
    assert found == set(words)
    assert all(re.fullmatch(regex, word) for word in words)


def test_a_token_from_elsewhere_that_leaves_the_grammar_is_a_failure() -> None:
    matcher = _matcher("ab")
    matcher.follow([ONE])
    assert isinstance(matcher.failure, InternalError)


def test_a_grammar_no_token_can_spell_fails_and_still_gives_the_step_a_token() -> None:
    matcher = _matcher("x+")
    assert _ids(matcher.allowed([])[0]) == {EOS}
    assert isinstance(matcher.failure, BadRequest)
    assert matcher.failure.field == "grammar"


def test_a_grammar_that_grows_too_complex_fails_by_field_and_without_quoting_anybody() -> None:
    inner = LLMatcher(
        load_letters(),
        LLMatcher.grammar_from_regex("((a|b)*a(a|b){12})*c"),
        log_level=0,
        limits=LLParserLimits(step_lexer_fuel=40, verbose_errors=False),
    )
    matcher = GrammarMatcher(inner, len(TEXTS), (EOS,))
    output: list[int] = []
    while matcher.failure is None and len(output) < 60:
        output.append((A, B, A, A)[len(output) % 4])
        matcher.follow(output)
        matcher.allowed([A, B])
    assert isinstance(matcher.failure, BadRequest)
    assert matcher.failure.field == "grammar"
    assert "\n" not in str(matcher.failure)
    assert _ids(matcher.allowed([])[0]) == {EOS}
