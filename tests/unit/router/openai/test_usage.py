"""Usage while an answer runs, at its end, and when it has none."""

from __future__ import annotations

import pytest

from sluice.errors import TransferFailed
from tests.integration.router_harness import USAGE, steps
from tests.unit.router.one_pair import ToldDecode, app_over, ask, told

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("path", [_COMPLETIONS, _CHAT])
def test_a_stream_that_fails_still_says_what_it_used(path: str) -> None:
    decode = ToldDecode(*steps("ab", "c"), TransferFailed("it broke"))
    prompt = {"prompt": "hi"} if path == _COMPLETIONS else {"messages": [_USER]}
    events = ask(
        app_over(decode), path, **prompt, stream=True, stream_options={"include_usage": True}
    )
    *_, usage, error = events
    assert error["error"]["code"] == "TransferFailed"
    assert usage["choices"] == []
    prompt_tokens = len(decode.calls[0].prompt)
    assert usage["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 3,
        "total_tokens": prompt_tokens + 3,
        "prompt_tokens_details": None,
    }


def test_a_failing_stream_without_usage_has_none() -> None:
    decode = ToldDecode(*steps("ab"), TransferFailed("it broke"))
    events = ask(app_over(decode), _COMPLETIONS, prompt="hi", stream=True)
    assert ["error" in event for event in events] == [False, True]


@pytest.mark.parametrize("path", [_COMPLETIONS, _CHAT])
def test_running_usage_counts_up_choice_by_choice(path: str) -> None:
    prompt = {"prompt": "hi"} if path == _COMPLETIONS else {"messages": [_USER]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    app = app_over(told("ab", "c", "d"))
    *chunks, last, done = ask(app, path, **prompt, n=2, stream=True, stream_options=options)
    assert done == "[DONE]"
    for index in range(2):
        mine = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in mine]
        assert counts == sorted(counts)
        assert {2, 3, 4} <= set(counts)
        assert all("sluice" not in usage for usage in mine)
    assert last["usage"]["completion_tokens"] == 2 * USAGE.completion_tokens
    assert last["usage"]["sluice"]["verify_steps"] == 2 * USAGE.verify_steps


def test_running_usage_needs_usage() -> None:
    options = {"continuous_usage_stats": True}
    events = ask(
        app_over(told("ab")), _COMPLETIONS, prompt="hi", stream=True, stream_options=options
    )
    assert not any("usage" in event for event in events[:-1])
