"""How tokens are chosen, and what they were worth, survives the wire to the last bit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import BadRequest
from sluice.rpc.convert_sampling import (
    prompt_scores_from_pb,
    prompt_scores_to_pb,
    sampling_from_pb,
    sampling_to_pb,
)
from sluice.types import Grammar, GrammarKind, Logprobs, Sampling, TokenLogprob
from sluice.v1 import prefill_pb2

counts = st.none() | st.integers(0, 20)
ids = st.integers(0, 2**32 - 1)
finite = st.floats(-100, 100)
samplings = st.builds(
    Sampling,
    max_tokens=st.integers(0, 2**32 - 1),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 2**32 - 1),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.lists(ids, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    min_p=st.floats(0, 1),
    min_tokens=st.integers(0, 2**32 - 1),
    presence_penalty=finite,
    frequency_penalty=finite,
    repetition_penalty=finite,
    logit_bias=st.lists(st.tuples(ids, finite), max_size=3).map(tuple),
    logprobs=counts,
    prompt_logprobs=counts,
    grammar=st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), st.text(max_size=9)),
)
float32 = st.floats(-1000, 0, width=32)
logprobs = st.builds(
    Logprobs, float32, st.lists(st.builds(TokenLogprob, ids, float32), max_size=3).map(tuple)
)


@given(samplings)
def test_sampling_arrives_equal_to_the_last_bit(sampling: Sampling) -> None:
    wire = sampling_to_pb(sampling).SerializeToString()
    assert sampling_from_pb(prefill_pb2.SamplingParams.FromString(wire)) == sampling


@given(st.lists(logprobs, max_size=3))
def test_prompt_scores_arrive_equal_to_the_last_bit(scores: list[Logprobs]) -> None:
    sent = (None, *scores)
    wire = prompt_scores_to_pb(sent).SerializeToString()
    assert prompt_scores_from_pb(prefill_pb2.PromptScores.FromString(wire)) == sent


def test_scores_of_the_longest_allowed_prompt_fit_a_message() -> None:
    from sluice.engine.limits import MAX_ALTERNATIVES, MAX_PROMPT_SCORES
    from sluice.rpc.client import ChannelConfig

    top = tuple(TokenLogprob(2**18 - i, -20.5 - i) for i in range(MAX_ALTERNATIVES))
    one = Logprobs(-3.25, top)
    size = prompt_scores_to_pb((None, one)).ByteSize() * MAX_PROMPT_SCORES // (len(top) + 1)
    assert 4 * size < ChannelConfig().max_message_bytes


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("max_tokens", Sampling(max_tokens=-1)),
        ("min_tokens", Sampling(min_tokens=-1)),
        ("top_k", Sampling(top_k=2**32)),
        ("seed", Sampling(seed=-3)),
        ("seed", Sampling(seed=2**64)),
        ("stop_token_ids", Sampling(stop_token_ids=(1, -1))),
        ("logit_bias", Sampling(logit_bias=((-1, 0.5),))),
        ("logprobs", Sampling(logprobs=-1)),
        ("prompt_logprobs", Sampling(prompt_logprobs=-1)),
    ],
)
def test_a_number_the_wire_cannot_hold_is_a_bad_request(field: str, sampling: Sampling) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        sampling_to_pb(sampling)
    assert caught.value.field == field


def test_a_grammar_of_another_release_is_a_bad_request() -> None:
    message = prefill_pb2.SamplingParams(grammar=prefill_pb2.Grammar(kind="peg", text="x"))
    with pytest.raises(BadRequest, match="'peg', this release knows json_schema") as caught:
        sampling_from_pb(message)
    assert caught.value.field == "grammar"
