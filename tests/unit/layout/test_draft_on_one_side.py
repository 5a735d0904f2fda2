"""A draft on one pod only: refused by default; with a flag, agreed without any draft component."""

from __future__ import annotations

import pytest

from sluice.layout.layout import Layout
from sluice.layout.negotiate import Agreement, DraftHandover, Refusal, Severity, negotiate
from tests.unit.layout.example_layouts import SMALL, Pod, layout_of

Pods = tuple[Layout, Layout]


@pytest.fixture(params=["paged", "unified"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pods(mode: str, prefill_steps: int, decode_steps: int) -> Pods:
    return (
        layout_of(SMALL, Pod("prefill", mode, steps=prefill_steps)),
        layout_of(SMALL, Pod("decode", mode, steps=decode_steps)),
    )


@pytest.mark.parametrize(
    ("steps", "lacks", "has"), [((0, 3), "PREFILL", "DECODE"), ((3, 0), "DECODE", "PREFILL")]
)
def test_it_is_refused_by_default(mode: str, steps: tuple[int, int], lacks: str, has: str) -> None:
    outcome = negotiate(*pods(mode, *steps))
    assert isinstance(outcome, Refusal)
    (cause,) = [m for m in outcome.fatal if not m.cause]
    assert cause.path == "spec.algorithm"
    assert f"only the {has.lower()} pod has a draft" in cause.explanation
    assert f"SLUICE_{lacks}_SPEC_STEPS=3" in cause.remedy
    assert f"SLUICE_{has}_SPEC_STEPS=0" in cause.remedy
    assert "SLUICE_DECODE_ALLOW_MISSING_DRAFT=true" in cause.remedy
    effects = {m.path for m in outcome.fatal if m.cause == "spec.algorithm"}
    assert {"spec.steps", "spec.draft_tokens", "components[draft.hidden]"} <= effects


def test_decode_alone_may_draft_and_then_marks_the_window_invalid(mode: str) -> None:
    outcome = negotiate(*pods(mode, 0, 3), allow_missing_draft=True)
    assert isinstance(outcome, Agreement)
    assert outcome.draft is DraftHandover.WITHHELD
    assert not outcome.draft_valid
    assert not any(name.startswith("draft.") for name in outcome.components)
    (note,) = [m for m in outcome.notes if m.path == "spec.algorithm"]
    assert note.severity is Severity.CONVERTIBLE
    assert "decode marks the draft window invalid" in note.explanation


def test_prefill_alone_may_draft_and_its_draft_state_stays(mode: str) -> None:
    outcome = negotiate(*pods(mode, 3, 0), allow_missing_draft=True)
    assert isinstance(outcome, Agreement)
    assert outcome.draft is DraftHandover.UNUSED
    assert outcome.draft_valid
    assert not any(name.startswith("draft.") for name in outcome.components)


def test_neither_pod_drafting_needs_no_flag(mode: str) -> None:
    outcome = negotiate(*pods(mode, 0, 0))
    assert isinstance(outcome, Agreement)
    assert outcome.draft is DraftHandover.NONE
    assert len(outcome.components) == 7


def test_the_flag_changes_nothing_where_both_pods_draft(mode: str) -> None:
    assert negotiate(*pods(mode, 3, 3), allow_missing_draft=True) == negotiate(*pods(mode, 3, 3))


def test_the_flag_excuses_the_draft_and_nothing_else(mode: str) -> None:
    prefill, _ = pods(mode, 0, 3)
    decode = layout_of(SMALL, Pod("decode", mode, page_tokens=256))
    outcome = negotiate(prefill, decode, allow_missing_draft=True)
    assert isinstance(outcome, Refusal)
    assert [m.path for m in outcome.fatal if not m.cause] == ["geometry.page_tokens"]


def test_agreeing_with_and_without_the_draft_are_two_agreements(mode: str) -> None:
    outcomes = [
        negotiate(*pods(mode, p, d), allow_missing_draft=True) for p in (0, 3) for d in (0, 3)
    ]
    assert len({o.digest for o in outcomes if isinstance(o, Agreement)}) == 4
