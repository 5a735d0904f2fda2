"""Logprobs in both endpoints' shapes, of answers and prompts, whole and streamed."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.openai.logprobs import Offsets
from sluice.rpc.messages import Event, Finished, PromptScored, Tokens
from sluice.types import FinishReason, Logprobs, TokenLogprob
from tests.integration.router_harness import EOS, TOKENIZER, USAGE, ids
from tests.unit.router.one_pair import ToldDecode, app_over, ask, told

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_A, _B, _E_ACUTE = ids("a"), ids("b"), ids("é")  # the last is two tokens, neither a character


def _scores(token: int, logprob: float = -0.5) -> Logprobs:
    return Logprobs(logprob, (TokenLogprob(_B[0], -0.25), TokenLogprob(token, logprob)))


def _step(*tokens: int) -> Tokens:
    return Tokens(tokens, None, tuple(_scores(token) for token in tokens))


def _answers(*steps: Event) -> ToldDecode:
    return ToldDecode(*steps, Finished(FinishReason.STOP, USAGE))


def test_a_chats_tokens_with_bytes_and_alternatives() -> None:
    app = app_over(_answers(_step(*_A), _step(*_E_ACUTE)))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    answer = ask(app, _CHAT, **body, logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "b", "logprob": -0.25, "bytes": [98]},
            {"token": "a", "logprob": -0.5, "bytes": [97]},
        ],
    }
    assert [token["token"] for token in content] == ["a", "�", "�"]
    assert bytes(content[1]["bytes"] + content[2]["bytes"]).decode() == "é"
    events = ask(app, _CHAT, **body, logprobs=True, top_logprobs=2, stream=True)[:-1]
    pieces = [event["choices"][0]["logprobs"] for event in events]
    assert pieces[0] is None, "the opening chunk has no token"
    assert [token for piece in pieces if piece for token in piece["content"]] == content


def test_what_is_asked_of_the_pods() -> None:
    decode = told("x")
    app = app_over(decode)
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    ask(app, _CHAT, **chat)
    ask(app, _CHAT, **chat, logprobs=True)
    ask(app, _CHAT, **chat, logprobs=True, top_logprobs=3, prompt_logprobs=1)
    ask(app, _COMPLETIONS, prompt="a", logprobs=2)
    ask(app, _COMPLETIONS, prompt="a", logprobs=2, echo=True)
    ask(app, _COMPLETIONS, prompt="a", echo=True)
    ask(app, _COMPLETIONS, prompt="a", logprobs=0, echo=True, prompt_logprobs=4)
    asked = [(c.sampling.logprobs, c.sampling.prompt_logprobs) for c in decode.calls]
    assert asked == [(None, None), (0, None), (3, 1), (2, None), (2, 2), (None, None), (0, 4)]


def test_a_completions_tokens_and_where_they_begin() -> None:
    app = app_over(_answers(_step(*_A), _step(*_E_ACUTE), _step(*_B)))
    logprobs = ask(app, _COMPLETIONS, prompt="x", logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "�", "�", "b"]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["top_logprobs"][0] == {"b": -0.25, "a": -0.5}
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    events = ask(app, _COMPLETIONS, prompt="x", logprobs=2, stream=True)[:-1]
    pieces = [event["choices"][0]["logprobs"] for event in events]
    for field, values in logprobs.items():
        assert [value for piece in pieces for value in piece[field]] == values, field


def _echoing(prompt: tuple[int, ...]) -> ToldDecode:
    positions = (None, *(_scores(token) for token in prompt[1:]))
    return _answers(PromptScored(positions), _step(*_A))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echo_has_the_prompts_logprobs_too(stream: bool, as_ids: bool) -> None:
    prompt = TOKENIZER.encode("hé")
    sent: object = list(prompt) if as_ids else "hé"
    answer = ask(
        app_over(_echoing(prompt)), _COMPLETIONS, prompt=sent, echo=True, logprobs=1, stream=stream
    )
    events = answer[:-1] if stream else [answer]
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == "héa"
    got = {
        field: [value for choice in choices for value in choice["logprobs"][field]]
        for field in choices[0]["logprobs"]
    }
    assert got["tokens"] == ["<s>", "h", "�", "�", "a"]
    assert got["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert got["top_logprobs"][0] is None
    assert got["text_offset"] == [0, 0, 1, 1, 2]


def test_max_tokens_0_only_reads_the_prompt() -> None:
    decode = _echoing(TOKENIZER.encode("hi"))
    body = {"prompt": "hi", "echo": True, "logprobs": 1, "max_tokens": 0, "return_token_ids": True}
    answer = ask(app_over(decode), _COMPLETIONS, **body)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("hi", "length", [])
    assert choice["logprobs"]["tokens"] == ["<s>", "h", "i"]
    assert answer["usage"]["completion_tokens"] == 0
    assert decode.calls[0].sampling.max_tokens == 1


def test_prompt_logprobs_come_by_id_with_ranks() -> None:
    prompt = TOKENIZER.encode("a")
    app = app_over(_echoing(prompt))
    (choice,) = ask(app, _COMPLETIONS, prompt="a", prompt_logprobs=2, n=1)["choices"]
    b, a = str(_B[0]), str(_A[0])
    assert choice["prompt_logprobs"] == [
        None,
        {
            b: {"logprob": -0.25, "rank": 1, "decoded_token": "b"},
            a: {"logprob": -0.5, "rank": 2, "decoded_token": "a"},
        },
    ]
    assert choice["logprobs"] is None


def test_a_token_outside_its_alternatives_is_there_without_a_rank() -> None:
    positions = (None, Logprobs(-7.0, (TokenLogprob(_B[0], -0.25),)))
    app = app_over(_answers(PromptScored(positions), _step(*_A)))
    (choice,) = ask(app, _COMPLETIONS, prompt="a", prompt_logprobs=1, logprobs=1, echo=True)[
        "choices"
    ]
    assert choice["prompt_logprobs"][1][str(_A[0])]["rank"] is None
    assert choice["logprobs"]["top_logprobs"][1] == {"b": -0.25, "a": -7.0}


def test_what_can_not_be_is_no_infinity() -> None:
    step = Tokens(_A, None, (Logprobs(-math.inf, ()),))
    logprobs = ask(app_over(_answers(step)), _COMPLETIONS, prompt="x", logprobs=0)["choices"][0]
    assert logprobs["logprobs"]["token_logprobs"] == [-9999.0]


def test_tokens_as_ids_on_request() -> None:
    app = app_over(_answers(_step(*_A)))
    body = {"prompt": "x", "logprobs": 2, "return_tokens_as_token_ids": True}
    logprobs = ask(app, _COMPLETIONS, **body)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{_A[0]}"]
    assert set(logprobs["top_logprobs"][0]) == {f"token_id:{_A[0]}", f"token_id:{_B[0]}"}


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=12), st.booleans())
def test_offsets_are_where_the_text_of_a_token_begins(text: str, shown: bool) -> None:
    tokens = (*TOKENIZER.encode(text, add_special_tokens=False), EOS, *ids("z"))
    offsets = Offsets(TOKENIZER, frozenset({EOS}) if shown else frozenset())
    begins = [offsets.push(token) for token in tokens]
    assert begins[0] == 0
    assert all(after - before in (0, 1) for before, after in pairwise(begins[:-1]))
    assert begins[-2] == len(text)
    assert begins[-1] == len(text) + (len("</s>") if shown else 0)
