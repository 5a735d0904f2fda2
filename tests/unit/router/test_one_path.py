"""Chat and completions are two faces of one path: the same prompt gives the same tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.openai.intake import sample_seed
from sluice.text.chat import Message
from tests.integration.router_harness import TEMPLATE, TOKENIZER, sse_events
from tests.unit.router.one_pair import StubDecode, app_over, post

_DECODE = StubDecode()
_APP = app_over(_DECODE)
_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
_MESSAGES = st.lists(
    st.builds(Message, st.sampled_from(["system", "developer", "user", "assistant"]), _TEXT),
    min_size=1,
    max_size=3,
)
_OPTIONS = st.fixed_dictionaries(
    {"seed": st.integers(), "n": st.integers(1, 3), "max_tokens": st.integers(1, 12)},
    optional={
        "stop": st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "temperature": st.sampled_from([0, 0.5]),
    },
)


def _answers(path: str, body: dict[str, Any]) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """(text, ids, reason) of every choice, and usage; streamed chunks put together."""
    full = {**body, "return_token_ids": True}
    if body["stream"]:
        full["stream_options"] = {"include_usage": True}
    response = post(_APP, path, json.dumps(full).encode())
    assert response.status_code == 200, response.text
    events = sse_events(response)[:-1] if body["stream"] else [response.json()]
    texts = [""] * body["n"]
    ids: list[list[int]] = [[] for _ in texts]
    reasons: list[str | None] = [None] * body["n"]
    for choice in (choice for event in events for choice in event["choices"]):
        index = choice["index"]
        holder = choice.get("message") or choice.get("delta")
        texts[index] += choice["text"] if holder is None else holder.get("content", "")
        ids[index] += choice.get("token_ids", [])
        assert reasons[index] is None, "nothing follows the end of a choice"
        reasons[index] = choice["finish_reason"]
    answers = list(zip(texts, map(tuple, ids), reasons, strict=True))
    return answers, events[-1]["usage"]


@settings(max_examples=60, deadline=None)
@given(_MESSAGES, _OPTIONS)
def test_the_same_rendered_prompt_gives_the_same_tokens(
    messages: list[Message], options: dict[str, Any]
) -> None:
    turns = [{"role": turn.role, "content": turn.content} for turn in messages]
    prompt = TEMPLATE.render(messages)
    _DECODE.calls.clear()
    for stream in (False, True):
        body = {**options, "stream": stream}
        chat = _answers("/v1/chat/completions", {**body, "messages": turns})
        text = _answers("/v1/completions", {**body, "prompt": prompt})
        assert chat == text
    prompts = {call.prompt for call in _DECODE.calls}
    assert prompts == {TOKENIZER.encode(prompt)}
    # Four bodies, each with the same seeds in the same order.
    seeds = [call.sampling.seed for call in _DECODE.calls]
    expected = [sample_seed(options["seed"] % (1 << 64), i) for i in range(options["n"])]
    assert sorted(seeds) == sorted(expected * 4)


@settings(max_examples=40, deadline=None)
@given(_TEXT, _OPTIONS)
def test_streamed_and_whole_answers_are_the_same(prompt: str, options: dict[str, Any]) -> None:
    body = {**options, "prompt": prompt}
    whole = _answers("/v1/completions", {**body, "stream": False})
    assert whole == _answers("/v1/completions", {**body, "stream": True})


@settings(max_examples=40, deadline=None)
@given(_TEXT, _OPTIONS)
def test_the_first_of_n_is_the_only_one_of_one(prompt: str, options: dict[str, Any]) -> None:
    body = {**options, "prompt": prompt, "stream": False}
    several, _ = _answers("/v1/completions", body)
    one, _ = _answers("/v1/completions", {**body, "n": 1})
    assert several[:1] == one


@pytest.mark.parametrize("seed", [0, 1, (1 << 64) - 1])
def test_sample_seeds_are_distinct_and_start_with_the_bodys_own(seed: int) -> None:
    seeds = [sample_seed(seed, sample) for sample in range(16)]
    neighbours = [sample_seed(seed ^ 1, sample) for sample in range(16)]
    assert seeds[0] == seed
    assert len({*seeds, *neighbours}) == 32
    assert all(0 <= value < 1 << 64 for value in seeds)


def test_sample_seeds_are_the_documented_ones() -> None:
    """Clients may recompute them; SHA-256 of "7:1" begins with these bytes."""
    assert sample_seed(7, 1) == 0xD7A0CEE7B61EB0E3
