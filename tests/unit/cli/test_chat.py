"""``sluice chat``: what is asked, what is kept, and how an answer ends early."""

from __future__ import annotations

import asyncio

import pytest

from sluice.cli.chat import Answer, Conversation, converse
from sluice.cli.stream import AnswerFailed, Chunk, Serving, UsageSeen
from tests.unit.cli.streaming import streams, text, usage


def _conversation(raw: bool = False, system: str = "Be kind.") -> Conversation:
    turns = [("user", "one"), ("assistant", "two"), ("user", "three")]
    return Conversation("m", system, raw, 64, 0.7, 0.9, 5, turns)


def test_the_whole_conversation_is_asked_again() -> None:
    chat = _conversation()
    assert chat.path() == "/v1/chat/completions"
    assert chat.body()["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    assert (chat.body()["seed"], chat.body()["top_p"], chat.body()["stream"]) == (5, 0.9, True)
    raw = _conversation(raw=True, system="")
    assert (raw.path(), raw.body()["prompt"]) == ("/v1/completions", "onetwothree")
    assert "messages" not in raw.body()


@pytest.mark.asyncio
async def test_an_answer_is_shown_as_it_comes() -> None:
    shown: list[Chunk] = []
    async with streams(text("a", 1), text("b", 2, 3), usage(9, 3), "[DONE]") as client:
        answer = await converse(client, _conversation(raw=True), shown.append)
    assert [chunk.text for chunk in shown] == ["a", "b"]
    assert (answer.text, answer.num_tokens, answer.stopped) == ("ab", 3, False)
    assert answer.first_s is not None
    assert answer.first_s <= answer.last_s


@pytest.mark.asyncio
async def test_ctrl_c_keeps_what_was_said_so_far() -> None:
    began = asyncio.Event()
    async with streams(text("a", 1), 60) as client:
        task = asyncio.create_task(converse(client, _conversation(), lambda _: began.set()))
        await asyncio.wait_for(began.wait(), 10)
        task.cancel()
        answer = await asyncio.wait_for(task, 10)
    assert (answer.text, answer.stopped, answer.num_tokens) == ("a", True, 1)
    assert answer.line().endswith("stopped")


@pytest.mark.asyncio
async def test_a_failure_is_told() -> None:
    async with streams(text("a", 1)) as client:
        with pytest.raises(AnswerFailed, match="DONE"):
            await converse(client, _conversation(), lambda _: None)


def test_the_line_under_an_answer() -> None:
    seen = UsageSeen(40, 11, 16, Serving(5, 6))
    assert Answer("x", False, 11, 0.25, 1.25, seen).line() == (
        "11 tokens, 10 tok/s, first after 250 ms, acceptance 2.20, 16 of 40 prompt tokens cached"
    )
    assert Answer("", False, 0, None, 0.0, None).line() == "0 tokens"
