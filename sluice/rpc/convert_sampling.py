"""Protobuf <-> plain data: how tokens are chosen, and what they and their alternatives were worth."""

from __future__ import annotations

from collections.abc import Iterable

from sluice.errors import BadRequest
from sluice.types import (
    Grammar,
    GrammarKind,
    Logprobs,
    PromptLogprobs,
    Sampling,
    TokenLogprob,
)
from sluice.v1 import prefill_pb2


def sampling_to_pb(sampling: Sampling) -> prefill_pb2.SamplingParams:
    """Raises ``BadRequest`` naming a value that the wire type can't hold (negative, too large)."""
    for name, value, bits in (
        ("max_tokens", sampling.max_tokens, 32),
        ("min_tokens", sampling.min_tokens, 32),
        ("top_k", sampling.top_k, 32),
        ("seed", sampling.seed, 64),
        ("logprobs", sampling.logprobs or 0, 32),
        ("prompt_logprobs", sampling.prompt_logprobs or 0, 32),
        *(("stop_token_ids", token, 32) for token in sampling.stop_token_ids),
        *(("logit_bias", token, 32) for token, _ in sampling.logit_bias),
    ):
        if not 0 <= value < 1 << bits:
            raise BadRequest(f"{name} is {value}, not in 0..2^{bits} - 1", field=name)
    return prefill_pb2.SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        min_p=sampling.min_p,
        min_tokens=sampling.min_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=[
            prefill_pb2.TokenBias(token_id=token, bias=bias) for token, bias in sampling.logit_bias
        ],
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        grammar=None if sampling.grammar is None else _grammar_to_pb(sampling.grammar),
    )


def sampling_from_pb(sampling: prefill_pb2.SamplingParams) -> Sampling:
    """Raises ``BadRequest`` for a grammar in a language this release doesn't know."""
    has = sampling.HasField
    return Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        min_p=sampling.min_p,
        min_tokens=sampling.min_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=tuple((item.token_id, item.bias) for item in sampling.logit_bias),
        logprobs=sampling.logprobs if has("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if has("prompt_logprobs") else None,
        grammar=_grammar_from_pb(sampling.grammar) if has("grammar") else None,
    )


def _grammar_to_pb(grammar: Grammar) -> prefill_pb2.Grammar:
    return prefill_pb2.Grammar(kind=grammar.kind.value, text=grammar.text)


def _grammar_from_pb(grammar: prefill_pb2.Grammar) -> Grammar:
    try:
        return Grammar(GrammarKind(grammar.kind), grammar.text)
    except ValueError:
        known = ", ".join(kind.value for kind in GrammarKind)
        raise BadRequest(
            f"grammar.kind is {grammar.kind!r}, this release knows {known}", field="grammar"
        ) from None


def logprobs_to_pb(logprobs: Logprobs) -> prefill_pb2.Logprobs:
    """Logprobs are float32 in the engine, so nothing is lost."""
    return prefill_pb2.Logprobs(
        logprob=logprobs.logprob,
        top_ids=[candidate.token_id for candidate in logprobs.top],
        top_logprobs=[candidate.logprob for candidate in logprobs.top],
    )


def logprobs_from_pb(logprobs: prefill_pb2.Logprobs) -> Logprobs:
    pairs = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    return Logprobs(logprobs.logprob, tuple(TokenLogprob(*pair) for pair in pairs))


def all_logprobs_from_pb(logprobs: Iterable[prefill_pb2.Logprobs]) -> tuple[Logprobs, ...]:
    return tuple(logprobs_from_pb(one) for one in logprobs)


def prompt_scores_to_pb(scores: PromptLogprobs) -> prefill_pb2.PromptScores:
    """The first token has no score, and no place in the message."""
    scored = (one for one in scores if one is not None)
    return prefill_pb2.PromptScores(positions=[logprobs_to_pb(one) for one in scored])


def prompt_scores_from_pb(scores: prefill_pb2.PromptScores) -> PromptLogprobs:
    return (None, *all_logprobs_from_pb(scores.positions))
