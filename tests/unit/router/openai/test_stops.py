"""Where stop strings count, and which special tokens show."""

from __future__ import annotations

import pytest

from sluice.rpc.messages import Finished, Tokens
from sluice.types import FinishReason
from tests.integration.router_harness import EOS, USAGE, ids
from tests.unit.router.one_pair import ToldDecode, app_over, ask, told

_COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, ""), (1, "ab"), (2, "ab"), (3, "abab"), (5, "ababab "), (9, "ababab ab")],
)
def test_no_stop_string_begins_before_min_tokens(min_tokens: int, text: str) -> None:
    app = app_over(told("ab", "ab", "ab", " ab"))
    body = {"prompt": "x", "stop": ["ab"], "min_tokens": min_tokens}
    assert ask(app, _COMPLETIONS, **body)["choices"][0]["text"] == text


@pytest.mark.parametrize(("skip", "text"), [(None, "ab"), (True, "ab"), (False, "a</s>b")])
def test_special_tokens_show_on_request(skip: bool | None, text: str) -> None:
    step = Tokens((*ids("a"), EOS, *ids("b")))
    app = app_over(ToldDecode(step, Finished(FinishReason.LENGTH, USAGE)))
    body = {"prompt": "x", "ignore_eos": True, "skip_special_tokens": skip}
    assert ask(app, _COMPLETIONS, **body)["choices"][0]["text"] == text
