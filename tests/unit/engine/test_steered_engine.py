"""Every sampling feature through the engine: with drafts as without, disaggregated as aggregated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from llguidance import LLMatcher, LLParserLimits

from sluice.config import EngineConfig
from sluice.engine import request as request_module
from sluice.engine.core import EngineCore
from sluice.engine.outputs import Failed
from sluice.engine.sampler import StepSampler
from sluice.errors import BadRequest, InternalError
from sluice.grammar.matcher import GrammarMatcher, Matcher
from sluice.spec.logprobs import score
from sluice.spec.steering import Steering, TokenCounts
from sluice.types import (
    FinishReason,
    Grammar,
    GrammarKind,
    Logprobs,
    PromptLogprobs,
    Request,
    RequestId,
    Role,
    Sampling,
)
from tests.unit.engine.driving import Story, hand_over, run_all, run_until_idle
from tests.unit.engine.toy_model import (
    EOS,
    VOCAB,
    OracleDraft,
    pool_config,
    prompt_of,
    request,
    toy_core,
)
from tests.unit.grammar.letters import letters, load_letters, text_of

GRAMMARS = letters()
LIST = Grammar(GrammarKind.REGEX, r"\[((ab|bc)(,|0))*1\]")
ENDLESS = Grammar(GrammarKind.REGEX, "(a|b|c)*")
LENGTHS = (1, 3, 8, 17)
FEATURES: dict[str, dict[str, object]] = {
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.5, "frequency_penalty": -0.4},
    "frequency": {"frequency_penalty": 1.2},
    "bias": {"logit_bias": ((3, 2.5), (EOS, -100.0))},
    "min_tokens": {"min_tokens": 6, "ignore_eos": False, "stop_token_ids": (3, 5)},
    "stop": {"ignore_eos": False, "stop_token_ids": (3,)},
    "grammar": {"grammar": LIST, "max_tokens": 30},
    "endless grammar": {"grammar": ENDLESS, "min_tokens": 5},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.3,
        "logit_bias": ((3, 1.5), (8, 2.0)),
        "min_tokens": 3,
        "grammar": LIST,
        "logprobs": 1,
        "prompt_logprobs": 0,
    },
}
WARM = {"temperature": 0.9, "top_p": 0.95, "min_p": 0.02}


def _core(role: Role = Role.AGGREGATED, *, steps: int = 3, **config: object) -> EngineCore:
    engine = EngineConfig(**{"max_running": 20, **config})  # type: ignore[arg-type]
    pool = pool_config(num_slots=20)
    return toy_core(role, steps=steps, config=engine, pool=pool, grammars=GRAMMARS)


def _requests(**sampling: object) -> list[Request]:
    return [request(f"r{n}", prompt_of(n), **{"seed": n, **sampling}) for n in LENGTHS]


def _tokens(stories: dict[RequestId, Story]) -> dict[RequestId, tuple[list[int], object]]:
    return {name: (story.tokens, story.finish) for name, story in stories.items()}


@pytest.mark.parametrize("feature", FEATURES)
def test_greedy_with_drafts_says_what_it_says_without(feature: str) -> None:
    requests = _requests(**FEATURES[feature])
    plain, drafted = (run_all(_core(steps=steps), requests) for steps in (0, 3))
    assert _tokens(drafted) == _tokens(plain)
    for name, story in plain.items():
        assert drafted[name].logprobs == story.logprobs
        assert drafted[name].prompt_logprobs == story.prompt_logprobs
        assert story.error is None


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("warm", [{}, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("steps", [0, 3])
def test_disaggregated_equals_aggregated(feature: str, warm: dict[str, object], steps: int) -> None:
    """At one, two and three tokens too, and with everybody taken off the memory between steps."""
    for max_tokens in (1, 2, 3, 12):
        chosen = {**FEATURES[feature], **warm, "max_tokens": max_tokens}
        chosen["min_tokens"] = min(max_tokens, int(str(chosen.get("min_tokens", 0))))
        requests = _requests(**chosen)
        expected = run_all(_core(steps=steps), requests)
        prefill, decode = (
            _core(role, steps=steps, max_batch_tokens=5 if role is Role.PREFILL else 512)
            for role in (Role.PREFILL, Role.DECODE)
        )
        every = 2 if max_tokens == 12 else 0
        assert hand_over(requests, prefill, decode, retract_every=every) == expected


def test_features_change_what_is_said() -> None:
    """Else the equalities above would say nothing about them."""
    plain = _tokens(run_all(_core(), _requests(max_tokens=14)))
    for name, chosen in FEATURES.items():
        steered = _tokens(run_all(_core(), _requests(**{"max_tokens": 14, **chosen})))
        if name != "logprobs":
            assert steered != plain, name


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("warm", [{}, WARM], ids=["greedy", "sampled"])
def test_answers_match_their_grammar_and_end_with_it(
    ignore_eos: bool, warm: dict[str, object]
) -> None:
    """Also where the end of sequence is ignored: nothing may follow a grammar's end."""
    requests = _requests(grammar=LIST, max_tokens=60, ignore_eos=ignore_eos, **warm)
    ended = 0
    for story in run_all(_core(), requests).values():
        if story.finish is FinishReason.STOP:
            ended += 1
            assert story.tokens[-1] == EOS
            assert re.fullmatch(LIST.text, text_of(story.tokens[:-1]))
        else:
            assert len(story.tokens) == 60
    assert ended


def test_a_stop_token_ends_an_answer_inside_its_grammar() -> None:
    requests = _requests(grammar=LIST, max_tokens=60, stop_token_ids=(8, 6))
    stories = run_all(_core(), requests).values()
    assert {story.tokens[-1] for story in stories} <= {EOS, 8, 6}
    assert any(story.tokens[-1] != EOS for story in stories)


def test_min_tokens_holds_back_every_end() -> None:
    chosen = {"ignore_eos": False, "stop_token_ids": (3, 5), "max_tokens": 14}
    early = run_all(_core(), _requests(**chosen)).values()
    late = run_all(_core(), _requests(min_tokens=7, **chosen)).values()
    assert any(len(story.tokens) < 7 for story in early)
    assert all(len(story.tokens) >= 7 for story in late)


# ---- logprobs


def _answer_and_scores(one: Request) -> tuple[tuple[Logprobs, ...], PromptLogprobs]:
    """Logprobs of an answer, and of the same tokens read as part of a prompt, without any draft."""
    story = run_all(_core(), [one])[one.request_id]
    sampling = Sampling(max_tokens=1, prompt_logprobs=one.sampling.logprobs)
    whole = replace(one, prompt=(*one.prompt, *story.tokens), sampling=sampling)
    scores = run_all(_core(), [whole])[one.request_id].prompt_logprobs
    assert scores is not None
    return tuple(story.logprobs), scores[len(one.prompt) :]


def test_logprobs_are_of_the_models_own_distribution_at_every_token() -> None:
    """Penalties, bias and temperature choose the token and leave its logprob alone."""
    chosen = {**FEATURES["bias"], "frequency_penalty": 1.0, **WARM, "logprobs": 11}
    for one in _requests(**chosen):
        answer, scores = _answer_and_scores(one)
        assert answer == scores
        assert len(answer) == 12
        for entry in answer:
            values = torch.tensor([candidate.logprob for candidate in entry.top])
            assert float(values.exp().sum()) == pytest.approx(1.0, abs=1e-5)
            assert values.tolist() == sorted(values.tolist(), reverse=True)


def test_logprobs_end_where_a_stop_token_cuts_a_step() -> None:
    """With a draft that is always right, the stop token is accepted with others behind it."""
    one = request("r", prompt_of(5), max_tokens=30, logprobs=1)
    truth = run_all(_core(steps=0), [one])[one.request_id].tokens
    stop = next(t for t in truth if truth.index(t) > 3 and (truth.index(t) - 1) % 4 < 2)
    draft = OracleDraft({one.request_id: [*one.prompt, *truth]}, lambda position: True)
    stopped = replace(one, sampling=replace(one.sampling, stop_token_ids=(stop,)))
    story = run_all(toy_core(draft=draft), [stopped])[one.request_id]
    assert story.tokens == truth[: truth.index(stop) + 1]
    assert len(story.tokens) < sum((count or 0) + 1 for count in story.accepted)
    assert len(story.logprobs) == len(story.tokens)


@pytest.mark.parametrize("budget", [1, 3, 4, 512])
def test_prompt_logprobs_do_not_depend_on_where_chunks_end(budget: int) -> None:
    requests = _requests(prompt_logprobs=4, max_tokens=2)
    stories = run_all(_core(max_batch_tokens=budget), requests)
    whole = run_all(_core(), requests)
    for one in requests:
        scores = stories[one.request_id].prompt_logprobs
        assert scores is not None
        assert len(scores) == len(one.prompt)
        assert scores[0] is None
        assert all(entry is not None for entry in scores[1:])
        assert scores == whole[one.request_id].prompt_logprobs


def test_a_prompt_that_wants_scores_starts_from_no_kept_prefix() -> None:
    core = _core(prefix_bytes=1 << 20, prefix_interval_tokens=16)
    prompt = prompt_of(40)
    first = run_all(core, [request("a", prompt, prompt_logprobs=1)])[RequestId("a")]
    again = run_all(core, [request("b", prompt, prompt_logprobs=1)])[RequestId("b")]
    assert again.prompt_logprobs == first.prompt_logprobs
    core.submit(request("c", prompt))
    core.step()
    assert core._requests[RequestId("c")].cached_tokens > 0
    run_until_idle(core)


def test_an_adopted_request_without_the_logprobs_it_asked_for_is_refused() -> None:
    decode = _core(Role.DECODE)
    decode.submit(request("r", prompt_of(3), logprobs=1))
    run_until_idle(decode)
    with pytest.raises(InternalError, match="without its logprobs"):
        decode.adopt(RequestId("r"), 4)


# ---- what goes wrong


def test_a_bad_grammar_is_refused_before_anything_is_queued() -> None:
    for role in (Role.AGGREGATED, Role.DECODE):
        core = _core(role)
        bad = request("r", prompt_of(3), grammar=Grammar(GrammarKind.REGEX, "("))
        with pytest.raises(BadRequest, match="unclosed group") as refused:
            core.submit(bad)
        assert refused.value.field == "grammar"
        assert core.stats().queued == 0
        core.submit(replace(bad, sampling=replace(bad.sampling, grammar=ENDLESS)))


def test_an_engine_without_a_tokenizer_refuses_grammars_only() -> None:
    core = toy_core()
    with pytest.raises(BadRequest, match="can't follow grammars"):
        core.submit(request("r", prompt_of(3), grammar=ENDLESS))
    assert run_all(core, [request("r", prompt_of(3))])[RequestId("r")].error is None


@pytest.mark.parametrize("role", [Role.AGGREGATED, Role.PREFILL])
def test_a_grammar_that_fails_under_way_takes_nobody_along(role: Role) -> None:
    """No token of this vocabulary spells an x, which shows when the first mask is computed."""
    core = _core(role)
    stuck = request("stuck", prompt_of(4), grammar=Grammar(GrammarKind.REGEX, "x+"))
    fine = request("fine", prompt_of(4), grammar=ENDLESS)
    for one in (stuck, fine):
        core.submit(one, (lambda chunk: None) if role is Role.PREFILL else None)
    outputs = run_until_idle(core)
    (failed,) = (output for output in outputs if isinstance(output, Failed))
    assert failed.request_id == "stuck"
    assert isinstance(failed.error, BadRequest)
    assert any(output.request_id == "fine" for output in outputs)
    for one in (stuck, fine):
        core.release(one.request_id)
    assert core.memory.at_baseline()


class _Frail:
    """Real matchers that may work so little a step that longer answers grow too complex for them."""

    def matcher(self, grammar: Grammar) -> Matcher:
        limits = LLParserLimits(step_lexer_fuel=80, verbose_errors=False)
        text = LLMatcher.grammar_from_regex(grammar.text)
        inner = LLMatcher(load_letters(), text, log_level=0, limits=limits)
        return GrammarMatcher(inner, VOCAB, (EOS,))


def test_a_grammar_that_fails_while_decoding_ends_its_own_answer_only() -> None:
    complex_one = Grammar(GrammarKind.REGEX, "((a|b)*a(a|b){12})*c")
    frail = request("frail", prompt_of(4), grammar=complex_one, max_tokens=60)
    fine = request("fine", prompt_of(4), max_tokens=60)
    core = toy_core(grammars=_Frail())
    stories = run_all(core, [frail, fine])
    assert isinstance(stories[frail.request_id].error, BadRequest)
    assert 0 < len(stories[frail.request_id].tokens) < 60
    assert stories[fine.request_id] == run_all(toy_core(), [fine])[fine.request_id]


# ---- the same tests notice the usual mistakes


def test_a_first_token_that_advances_the_grammar_twice_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = _requests(grammar=Grammar(GrammarKind.REGEX, "[abc]{5}"))
    expected = run_all(_core(), requests)
    assert hand_over(requests, _core(Role.PREFILL), _core(Role.DECODE)) == expected
    follow = GrammarMatcher.follow

    def twice(self: GrammarMatcher, output: Sequence[int]) -> None:
        if self._taken == 0 and output:
            self._inner.try_consume_tokens([output[0]])
        follow(self, output)

    monkeypatch.setattr(GrammarMatcher, "follow", twice)
    assert hand_over(requests, _core(Role.PREFILL), _core(Role.DECODE)) != expected


def test_logprobs_of_another_row_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(
        self: StepSampler, first_row: int, token_ids: Sequence[int], sampling: Sampling
    ) -> tuple[Logprobs, ...]:
        rows = self._logits_RV[first_row : first_row + len(token_ids)]
        return score(rows.flip(0), token_ids, 11)

    one = request("r", prompt_of(9), max_tokens=30, logprobs=11)
    answer, scores = _answer_and_scores(one)
    assert answer == scores
    monkeypatch.setattr(StepSampler, "logprobs", backwards)
    answer, scores = _answer_and_scores(one)
    assert answer != scores


def test_counts_that_miss_the_drafts_before_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: TokenCounts, drafts: Sequence[int]) -> torch.Tensor:
        return self._output_V.repeat(len(drafts) + 1, 1)

    requests = _requests(frequency_penalty=1.2, max_tokens=30)
    plain = _tokens(run_all(_core(steps=0), requests))
    monkeypatch.setattr(TokenCounts, "rows", forgetful)
    assert _tokens(run_all(_core(steps=0), requests)) == plain
    assert _tokens(run_all(_core(steps=3), requests)) != plain


def test_a_decode_that_forgets_the_prompt_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = _requests(repetition_penalty=1.8)
    expected = run_all(_core(), requests)
    prefill, decode = _core(Role.PREFILL), _core(Role.DECODE)

    def without_prompt(sampling, prompt, output, stop_ids, matcher):  # type: ignore[no-untyped-def]
        return Steering(sampling, () if decode_submits[-1] else prompt, output, stop_ids, matcher)

    decode_submits = [False]
    submit = decode.submit

    def submit_to_decode(one: Request) -> None:
        decode_submits.append(True)
        submit(one)
        decode_submits.append(False)

    monkeypatch.setattr(request_module, "Steering", without_prompt)
    monkeypatch.setattr(decode, "submit", submit_to_decode)
    assert hand_over(requests, prefill, decode) != expected
