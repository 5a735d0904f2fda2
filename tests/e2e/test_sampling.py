"""Every sampling feature over real pods gives what one process gives, at one, two and three tokens too."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sluice.errors import BadRequest
from sluice.types import Grammar, GrammarKind, Logprobs, Sampling
from tests.e2e.aggregated import Case, Outcome, run_aggregated
from tests.e2e.pods import Pair, generate
from tests.e2e.test_equality import run_disaggregated

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(300)]

EOS = 1
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
WORDS = Grammar(GrammarKind.REGEX, "(the|king|said){1,4}")
FEATURES: tuple[dict[str, object], ...] = (
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.2, "frequency_penalty": 0.4},
    {"logit_bias": ((70, 6.0), (EOS, -50.0)), "logprobs": 2},
    {"min_tokens": 4, "stop_token_ids": tuple(range(60, 200))},
    {"stop_token_ids": tuple(range(60, 120)), "logprobs": 0},
    {"logprobs": 5, "prompt_logprobs": 3},
    {"grammar": Grammar(GrammarKind.JSON_OBJECT)},
    {"grammar": Grammar(GrammarKind.JSON_SCHEMA, SCHEMA), "logprobs": 1},
    {"grammar": WORDS, "frequency_penalty": 0.8, "ignore_eos": True},
    {"grammar": Grammar(GrammarKind.LARK, 'start: "a" start "b" | "c"'), "min_tokens": 3},
)
LENGTHS = (30, 1, 2, 3)


@dataclass(frozen=True)
class Rig:
    """A running pair, what it was asked before the tests, and what one process says to that."""

    pair: Pair
    cases: list[Case]
    expected: list[Outcome]


def cases_of(seed: int) -> list[Case]:
    """Each feature greedy and sampled, at each length."""
    rng = random.Random(seed)
    cases = []
    for number, (feature, max_tokens) in enumerate(
        (feature, max_tokens) for feature in FEATURES for max_tokens in LENGTHS
    ):
        chosen: dict[str, object] = {"max_tokens": max_tokens, "seed": number, **feature}
        chosen["min_tokens"] = min(max_tokens, int(str(chosen.get("min_tokens", 0))))
        if number % 2:
            chosen |= {"temperature": 0.9, "min_p": 0.02}
        prompt = tuple(rng.randrange(3, 500) for _ in range(rng.choice([1, 5, 60, 130, 200])))
        cases.append(Case(prompt, Sampling(**chosen)))  # type: ignore[arg-type]
    return cases


@pytest.fixture(scope="module", params=[None, 0], ids=["spec", "plain"])
def rig(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_dir: Path
) -> Iterator[Rig]:
    steps: int | None = request.param
    cases = cases_of(5)
    expected = asyncio.run(run_aggregated(model_dir, cases, spec_steps=steps))
    settings = {} if steps is None else {"spec_steps": str(steps)}
    folder = tmp_path_factory.mktemp("pair")
    pair = Pair.create(
        folder, model_dir, prefill_max_batch_tokens="96", max_model_tokens="4200", **settings
    )
    pair.start()
    try:
        asyncio.run(pair.ready())
        yield Rig(pair, cases, expected)
    finally:
        pair.kill()


def _words(outcome: Outcome) -> Outcome:
    return replace(outcome, logprobs=(), prompt_logprobs=None)


def _near(got: Logprobs | None, expected: Logprobs | None) -> bool:
    """Batches of other shapes add up in another order."""
    if got is None or expected is None:
        return got is expected
    values = [(one.logprob, *(c.logprob for c in one.top)) for one in (got, expected)]
    return values[0] == pytest.approx(values[1], abs=1e-4)


def test_disaggregated_equals_aggregated(rig: Rig) -> None:
    async def run() -> list[Outcome]:
        outcomes = await run_disaggregated(rig.pair, rig.cases)
        await rig.pair.baseline()
        return outcomes

    for case, expected, got in zip(rig.cases, rig.expected, asyncio.run(run()), strict=True):
        assert _words(got) == _words(expected), case.sampling
        for mine, theirs in (
            (got.logprobs, expected.logprobs),
            (got.prompt_logprobs or (), expected.prompt_logprobs or ()),
        ):
            assert len(mine) == len(theirs)
            assert all(_near(a, b) for a, b in zip(mine, theirs, strict=True)), case.sampling
        wanted = case.sampling.logprobs is not None
        assert len(got.logprobs) == (len(got.token_ids) if wanted else 0)
        scored = case.sampling.prompt_logprobs is not None
        assert (len(got.prompt_logprobs or ()) == len(case.prompt)) is scored


def test_the_cases_reach_what_they_are_about(rig: Rig, model_dir: Path) -> None:
    """Grammars end answers, and what they end is well formed."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    complete: dict[GrammarKind, list[str]] = {kind: [] for kind in GrammarKind}
    for case, outcome in zip(rig.cases, rig.expected, strict=True):
        grammar = case.sampling.grammar
        if grammar is not None and outcome.reason == "stop":
            assert outcome.token_ids[-1] == EOS
            text = tokenizer.decode(list(outcome.token_ids[:-1]), skip_special_tokens=False)
            complete[grammar.kind].append(text)
    assert all(re.fullmatch(WORDS.text, text) for text in complete[GrammarKind.REGEX])
    assert all(re.fullmatch("a*cb*", text) for text in complete[GrammarKind.LARK])
    for text in complete[GrammarKind.JSON_OBJECT] + complete[GrammarKind.JSON_SCHEMA]:
        assert isinstance(json.loads(text), dict)
    assert complete[GrammarKind.REGEX]
    assert complete[GrammarKind.LARK]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (Sampling(grammar=Grammar(GrammarKind.REGEX, "(")), "grammar"),
        (Sampling(min_p=2.0), "min_p"),
        (Sampling(logit_bias=((512, 1.0),)), "logit_bias"),
        (Sampling(repetition_penalty=0.0), "repetition_penalty"),
        (Sampling(prompt_logprobs=21), "prompt_logprobs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_field(rig: Rig, sampling: Sampling, field: str) -> None:
    async def run() -> None:
        with pytest.raises(BadRequest) as refused:
            await generate(rig.pair, (3, 4, 5), sampling)
        assert refused.value.field == field
        await rig.pair.baseline()

    asyncio.run(run())


def test_scores_of_a_long_prompt_come_in_one_piece(rig: Rig) -> None:
    rng = random.Random(1)
    prompt = tuple(rng.randrange(3, 500) for _ in range(4096))
    sampling = Sampling(max_tokens=1, prompt_logprobs=5, logprobs=5)
    answer = asyncio.run(generate(rig.pair, prompt, sampling, timeout_s=120.0))
    assert answer.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == 4096
    assert all(entry is not None and len(entry.top) == 5 for entry in answer.prompt_logprobs[1:])
    assert len(answer.logprobs) == 1
