"""Reasoning apart from the answer, wherever the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.text.reply.reasoning import ReasoningParser, Thinking, thinking_after
from tests.unit.text.reply.answers import Reply, cut, read

_PLAIN = st.text("ab <>/\n", max_size=10)


@pytest.mark.parametrize(
    ("thinking", "text", "reasoning", "content"),
    [
        (Thinking.POSSIBLE, "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        (Thinking.POSSIBLE, "\n <think>hm</think>yes", "hm", "yes"),
        (Thinking.POSSIBLE, "yes <think>no</think>", "", "yes <think>no</think>"),
        (Thinking.POSSIBLE, "  yes", "", "  yes"),
        (Thinking.POSSIBLE, "<thi", "", "<thi"),
        (Thinking.POSSIBLE, "<think>\n\n</think>\n\nyes", "", "yes"),
        (Thinking.POSSIBLE, "<think>never ends", "never ends", ""),
        (Thinking.OPEN, "hm\n\nhm\n</think>\nyes\n", "hm\n\nhm", "yes\n"),
        (Thinking.OPEN, "hm</thin", "hm</thin", ""),
        (Thinking.OPEN, "</think>a</think>", "", "a</think>"),
        (Thinking.OVER, "\n<think>x</think>", "", "\n<think>x</think>"),
    ],
)
def test_where_it_is_split(thinking: Thinking, text: str, reasoning: str, content: str) -> None:
    expected = Reply(content, reasoning)
    assert read(ReasoningParser(thinking), [text]) == expected
    assert read(ReasoningParser(thinking), list(text)) == expected


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<thi", "</", "\n", " ", "x"]), max_size=9),
    st.lists(st.integers(0, 60), max_size=9),
    st.sampled_from(Thinking),
)
def test_cuts_change_nothing(pieces: list[str], cuts: list[int], thinking: Thinking) -> None:
    text = "".join(pieces)
    whole = read(ReasoningParser(thinking), [text])
    assert read(ReasoningParser(thinking), cut(text, cuts)) == whole


@pytest.mark.parametrize(
    ("prompt", "thinking"),
    [
        ("<|im_start|>assistant\n", Thinking.POSSIBLE),
        ("<|im_start|>assistant\n<think>\n", Thinking.OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Thinking.OVER),
    ],
)
def test_where_a_prompt_leaves_the_model(prompt: str, thinking: Thinking) -> None:
    assert thinking_after(prompt) is thinking
