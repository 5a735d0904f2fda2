"""One request of a load: what is sent, what is counted, and that no failure gets away."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import httpx
import pytest

from sluice.cli.bench.sample import Asking, Sample, ask
from sluice.cli.bench.workload import Item
from tests.unit.cli.streaming import streams, text, usage

_ASKING = Asking("m", 0.0, True, 5.0)
_ITEM = Item((1, 2, 3), 4)


async def _ask(client: httpx.AsyncClient, asking: Asking = _ASKING) -> Sample:
    ticks: Iterator[int] = itertools.count(1)  # each look at the clock is a second later
    async with client:
        return await ask(client, asking, _ITEM, 0.5, lambda: float(next(ticks)))


@pytest.mark.asyncio
async def test_a_whole_answer() -> None:
    bodies: list[object] = []
    events = (text("a", 5), text("", 6, 7), text("", *()), text("b", 8), usage(3, 4), "[DONE]")
    sample = await _ask(streams(*events, bodies=bodies))
    assert sample.ok
    assert (sample.due_s, sample.sent_s, sample.end_s) == (0.5, 1.0, 5.0)
    assert sample.chunks_s == (2.0, 3.0, 4.0)  # one without a token is no arrival
    assert (sample.prompt_tokens, sample.output_tokens) == (3, 4)
    assert bodies == [
        {
            "model": "m",
            "prompt": [1, 2, 3],
            "max_tokens": 4,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
    ]


@pytest.mark.asyncio
async def test_a_lost_chunk_is_a_failure() -> None:
    sample = await _ask(streams(text("a", 5), text("b", 6), usage(3, 3), "[DONE]"))
    assert sample.error == "tokens lost"
    assert "2 tokens arrived, usage says 3" in sample.detail


@pytest.mark.asyncio
async def test_a_server_that_counts_no_tokens_is_believed_in_its_usage() -> None:
    plain = {"choices": [{"text": "a b"}]}
    sample = await _ask(streams(plain, plain, usage(3, 7), "[DONE]"))
    assert sample.ok
    assert (len(sample.chunks_s), sample.output_tokens) == (2, 7)


@pytest.mark.asyncio
async def test_a_cut_answer_keeps_what_arrived() -> None:
    sample = await _ask(streams(text("a", 5)))
    assert (sample.error, len(sample.chunks_s), sample.output_tokens) == ("cut short", 1, 1)


@pytest.mark.asyncio
async def test_an_answer_that_does_not_end_is_a_timeout() -> None:
    sample = await _ask(streams(text("a", 5), 60), Asking("m", 0.0, True, 0.1))
    assert sample.error == "timeout"
    assert sample.chunks_s
