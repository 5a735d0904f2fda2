"""Each formula by hand, their order, and the one law of speculation: row i is what a plain step would see."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sluice.spec.steering import Steering, TokenCounts, needs_steering
from sluice.types import Grammar, GrammarKind, Sampling
from tests.unit.grammar.letters import EOS, TEXTS, letters

VOCAB = len(TEXTS)
LOGITS = torch.tensor([[1.0, 2.0, -2.0, 4.0, -1.0, 0.0]])
INF = float("inf")
REGEX = Grammar(GrammarKind.REGEX, "(a|b|c|0){0,6}")


def _steer(
    sampling: Sampling,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop_ids: frozenset[int] = frozenset(),
    logits: Tensor = LOGITS,
    drafts: Sequence[int] = (),
) -> list[list[float]]:
    steered = Steering(sampling, prompt, output, stop_ids).steer(logits, drafts)
    rows: list[list[float]] = steered.tolist()
    return rows


def test_repetition_divides_what_is_positive_and_multiplies_the_rest() -> None:
    """Over prompt (1, 2) and output (3, 5); 5 has logit 0, which no penalty moves."""
    sampling = Sampling(repetition_penalty=2.0)
    rows = _steer(sampling, prompt=(1, 2, 2), output=(3, 5, 3))
    assert rows == [[1.0, 1.0, -4.0, 2.0, -1.0, 0.0]]


def test_presence_and_frequency_count_the_output_only() -> None:
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    rows = _steer(sampling, prompt=(1, 2, 2), output=(3, 0, 3))
    assert rows == [[1.0 - 0.75, 2.0, -2.0, 4.0 - 0.5 - 0.5, -1.0, 0.0]]


def test_bias_is_added_before_repetition_looks_at_the_sign() -> None:
    """-2 + 3 = 1 is positive, so it is divided; the other order would say -4 + 3 = -1."""
    sampling = Sampling(repetition_penalty=2.0, logit_bias=((2, 3.0), (5, -1.0)))
    assert _steer(sampling, output=(2,)) == [[1.0, 2.0, 0.5, 4.0, -1.0, -1.0]]


def test_repetition_comes_before_the_subtracted_penalties() -> None:
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=1.0)
    assert _steer(sampling, output=(3,))[0][3] == 4.0 / 2.0 - 1.0


@pytest.mark.parametrize(("so_far", "open_rows"), [(0, 1), (1, 2), (2, 3), (3, 3), (9, 3)])
def test_min_tokens_closes_the_end_in_just_the_rows_before_it(so_far: int, open_rows: int) -> None:
    """Rows are positions so_far, so_far + 1, so_far + 2; with min_tokens 2 the first open one is 2."""
    sampling = Sampling(min_tokens=2, max_tokens=20)
    rows = _steer(
        sampling,
        output=(4,) * so_far,
        stop_ids=frozenset({0, 3, 999}),
        logits=LOGITS.repeat(3, 1),
        drafts=(4, 4),
    )
    closed = 3 - open_rows
    assert [row[0] == row[3] == -INF for row in rows] == [True] * closed + [False] * open_rows
    assert all(row[1:3] == [2.0, -2.0] for row in rows)


def test_a_grammar_that_has_ended_ends_the_answer_although_min_tokens_is_not_reached() -> None:
    grammar = Grammar(GrammarKind.REGEX, "a")
    sampling = Sampling(min_tokens=5, grammar=grammar)
    steered = Steering(sampling, (1,), (1,), frozenset({EOS}), letters().matcher(grammar))
    row = steered.steer(torch.zeros(1, VOCAB), ())[0]
    assert (row > -INF).nonzero()[:, 0].tolist() == [EOS]


def test_steering_leaves_the_models_logits_alone() -> None:
    logits = LOGITS.clone()
    everything = Sampling(
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        logit_bias=((1, 5.0),),
        min_tokens=3,
    )
    _steer(everything, prompt=(1,), output=(2,), stop_ids=frozenset({0}), logits=logits)
    assert torch.equal(logits, LOGITS)


@pytest.mark.parametrize(
    ("sampling", "needed"),
    [
        (Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=4, logprobs=3), False),
        (Sampling(stop_token_ids=(4,), ignore_eos=True, prompt_logprobs=0), False),
        (Sampling(min_tokens=1), True),
        (Sampling(logit_bias=((1, 0.5),)), True),
        (Sampling(presence_penalty=-0.1), True),
        (Sampling(frequency_penalty=0.1), True),
        (Sampling(repetition_penalty=0.9), True),
        (Sampling(grammar=Grammar(GrammarKind.JSON_OBJECT)), True),
    ],
)
def test_only_requests_that_ask_leave_the_fast_path(sampling: Sampling, needed: bool) -> None:
    assert needs_steering(sampling) is needed


ids = st.integers(1, VOCAB - 1)
samplings = st.builds(
    Sampling,
    max_tokens=st.just(30),
    min_tokens=st.integers(0, 8),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (EOS, -2.0))]),
    grammar=st.sampled_from([None, REGEX]),
)


def _row_by_row(
    sampling: Sampling, prompt: list[int], output: list[int], drafts: list[int], logits: Tensor
) -> None:
    """One verify step against a fresh plain step for each position that drafts can reach."""

    def fresh(so_far: list[int]) -> Steering:
        matcher = letters().matcher(sampling.grammar) if sampling.grammar else None
        return Steering(sampling, prompt, so_far, frozenset({EOS, 7}), matcher)

    verify = fresh(output)
    together = verify.steer(logits, drafts)
    assert torch.equal(verify.steer(logits, drafts), together)  # drafts left nothing behind
    for i in range(len(drafts) + 1):
        alone = fresh(output + drafts[:i]).steer(logits[i : i + 1], ())
        assert torch.equal(together[i : i + 1], alone), f"row {i}"
        if i < len(drafts) and together[i, drafts[i]] == -INF:
            return  # rejected for certain: nobody looks at the rows behind it


@settings(max_examples=150, deadline=None)
@given(
    samplings,
    st.lists(ids, min_size=1, max_size=6),
    st.lists(st.sampled_from([1, 2, 3, 6]), max_size=5),
    st.lists(ids, max_size=4),
    st.integers(0, 1000),
)
def test_each_row_is_what_a_plain_step_would_see(
    sampling: Sampling, prompt: list[int], output: list[int], drafts: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(drafts) + 1, VOCAB, generator=generator)
    _row_by_row(sampling, prompt, output, drafts, logits)


def test_counts_that_miss_the_drafts_before_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: TokenCounts, drafts: Sequence[int]) -> Tensor:
        return self._output_V.repeat(len(drafts) + 1, 1)

    monkeypatch.setattr(TokenCounts, "rows", forgetful)
    with pytest.raises(AssertionError, match="row 1"):
        _row_by_row(Sampling(presence_penalty=1.0), [1], [2], [3, 3], torch.zeros(3, VOCAB))


def test_counts_follow_an_output_that_grows_and_count_each_token_once() -> None:
    output: list[int] = [3]
    steered = Steering(Sampling(frequency_penalty=1.0), (1,), output, frozenset())
    for expected in (1, 2, 3):
        for _ in range(2):
            assert float(steered.steer(torch.zeros(1, VOCAB), ())[0, 3]) == -expected
        output.append(3)
