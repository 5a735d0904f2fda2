"""One request of a load: when it should have been sent, when it was, what came back and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

import httpx

from sluice.cli.bench.workload import Item
from sluice.cli.stream import AnswerFailed, UsageSeen, stream_answer


@dataclass(frozen=True)
class Sample:
    """Times are seconds since the load began. ``error`` empty: the answer came whole.

    ``due_s`` is when the schedule wanted it sent. Latencies count from there and not from ``sent_s``: a server that
    stalls, or a client that falls behind, must not shorten the waits of those behind it (coordinated omission).
    """

    due_s: float
    sent_s: float
    end_s: float
    chunks_s: tuple[float, ...] = ()  # arrivals of chunks that carried tokens
    prompt_tokens: int = 0
    output_tokens: int = 0
    usage: UsageSeen | None = None
    error: str = ""
    detail: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft_s(self) -> float | None:
        return self.chunks_s[0] - self.due_s if self.chunks_s else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first chunk; None when nothing came after it."""
        if len(self.chunks_s) < 2 or self.output_tokens < 2:
            return None
        return (self.chunks_s[-1] - self.chunks_s[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between one chunk with tokens and the next: what a reader sees as a pause."""
        return tuple(b - a for a, b in zip(self.chunks_s, self.chunks_s[1:], strict=False))


@dataclass(frozen=True)
class Asking:
    """How every request of a load is put."""

    model: str
    temperature: float
    ignore_eos: bool
    timeout_s: float


async def ask(
    client: httpx.AsyncClient, asking: Asking, item: Item, due_s: float, now: Callable[[], float]
) -> Sample:
    """Send ``item`` now and follow its answer to the end. Never raises for a failed answer."""
    sent_s = now()
    chunks: list[float] = []
    tokens = 0
    counted = True  # the server says how many tokens each chunk has
    usage: UsageSeen | None = None
    error = detail = ""
    try:
        async with asyncio.timeout(asking.timeout_s):
            async with aclosing(
                stream_answer(client, "/v1/completions", _body(asking, item))
            ) as answer:
                async for chunk in answer:
                    usage = chunk.usage or usage
                    counted = counted and chunk.num_tokens is not None
                    tokens += chunk.num_tokens or 0
                    if chunk.num_tokens or (
                        chunk.num_tokens is None and (chunk.text or chunk.reasoning)
                    ):
                        chunks.append(now())
    except AnswerFailed as failure:
        error, detail = failure.kind, failure.message
    except TimeoutError:
        error, detail = "timeout", f"not whole within {asking.timeout_s:g} s"
    if not error and usage is not None and counted and tokens != usage.completion_tokens:
        error = "tokens lost"
        detail = f"{tokens} tokens arrived, usage says {usage.completion_tokens}"
    if usage is not None and not counted:
        tokens = usage.completion_tokens
    asked = len(item.prompt) if isinstance(item.prompt, tuple) else 0
    return Sample(
        due_s,
        sent_s,
        now(),
        tuple(chunks),
        usage.prompt_tokens if usage else asked,
        tokens,
        usage,
        error,
        detail,
    )


def _body(asking: Asking, item: Item) -> dict[str, object]:
    return {
        "model": asking.model,
        "prompt": item.prompt if isinstance(item.prompt, str) else list(item.prompt),
        "max_tokens": item.max_tokens,
        "temperature": asking.temperature,
        "ignore_eos": asking.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
