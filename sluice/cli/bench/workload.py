"""What is sent: prompts and answer lengths, synthetic, from a file of texts, or from a Mooncake-style trace.

A trace is JSON lines with ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids``, one for
each block of 512 input tokens; equal ids mean equal blocks, so requests share prefixes as the recorded ones did (Qin et
al., Mooncake, FAST'25; the format of its published traces).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.errors import ConfigError

_TRACE_BLOCK_TOKENS = 512
_SPREAD = 4  # standard deviations a normal length may be off its mean


@dataclass(frozen=True)
class Item:
    """One request. ``prompt`` is text or token ids; ``at_s`` is when a trace wants it sent, from its start."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    at_s: float | None = None


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts, at least 1: constant, uniform (ends included), or normal, cut at 4 deviations."""

    low: int
    high: int
    deviation: float = 0.0  # > 0: normal around low

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """``512``, ``128-1024`` or ``512~64`` (mean~deviation). Raises ValueError."""
        if "~" in text:
            mean, _, deviation = text.partition("~")
            lengths = cls(int(mean), int(mean), float(deviation))
        else:
            low, _, high = text.partition("-")
            lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high or lengths.deviation < 0:
            raise ValueError(f"{text!r} is no length: use 512, 128-1024 or 512~64")
        return lengths

    def draw(self, rng: random.Random) -> int:
        if self.deviation:
            reach = _SPREAD * self.deviation
            drawn = min(
                max(rng.gauss(self.low, self.deviation), self.low - reach), self.low + reach
            )
            return max(1, round(drawn))
        return rng.randint(self.low, self.high)


def synthetic(
    count: int,
    prompt: Lengths,
    output: Lengths,
    vocabulary: Sequence[int],
    *,
    shared_prefix: int = 0,
    seed: int | str = 0,
) -> Iterator[Item]:
    """Prompts of ids drawn from ``vocabulary``; the first ``shared_prefix`` of each are the same in all."""
    rng = random.Random(seed)
    prefix = tuple(rng.choices(vocabulary, k=shared_prefix))
    for _ in range(count):
        length, max_tokens = prompt.draw(rng), output.draw(rng)
        own = rng.choices(vocabulary, k=max(0, length - shared_prefix))
        yield Item((*prefix, *own)[:length], max_tokens)


def from_texts(file: Path, count: int, output: Lengths, *, seed: int = 0) -> Iterator[Item]:
    """One prompt a line, over and over until there are ``count``. Raises `ConfigError`."""
    texts = [line for line in _lines(file) if line.strip()]
    if not texts:
        raise ConfigError(f"{file} has no prompts", stage="bench", remedy="write one a line")
    rng = random.Random(seed)
    return (Item(texts[i % len(texts)], output.draw(rng)) for i in range(count))


def from_trace(
    file: Path,
    vocabulary: Sequence[int],
    *,
    limit: int | None = None,
    speed: float = 1.0,
    scale: float = 1.0,
    seed: int = 0,
) -> list[Item]:
    """Requests in the order of their time, the first at 0. ``scale`` shrinks all lengths, ``speed`` > 1 shortens waits.

    Raises `ConfigError` that names the line.
    """
    block = max(1, round(_TRACE_BLOCK_TOKENS * scale))
    rows = [_row(file, number, line) for number, line in enumerate(_lines(file), 1) if line.strip()]
    rows = sorted(rows, key=lambda row: row.timestamp_ms)[:limit]
    if not rows:
        raise ConfigError(f"{file} has no requests", stage="bench")
    blocks: dict[int, tuple[int, ...]] = {}

    def tokens(hash_id: int) -> tuple[int, ...]:
        if hash_id not in blocks:
            rng = random.Random(f"{seed}:{hash_id}")
            blocks[hash_id] = tuple(rng.choices(vocabulary, k=block))
        return blocks[hash_id]

    start_ms = rows[0].timestamp_ms
    items = []
    for number, row in enumerate(rows):
        wanted = max(1, round(row.input_length * scale))
        prompt = [token for hash_id in row.hash_ids for token in tokens(hash_id)]
        if len(prompt) < wanted:  # a rest that the trace gives no id is nobody else's
            rng = random.Random(f"{seed}:rest:{number}")
            prompt += rng.choices(vocabulary, k=wanted - len(prompt))
        max_tokens = max(1, round(row.output_length * scale))
        items.append(
            Item(tuple(prompt[:wanted]), max_tokens, (row.timestamp_ms - start_ms) / 1000 / speed)
        )
    return items


@dataclass(frozen=True)
class _Row:
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def _row(file: Path, number: int, line: str) -> _Row:
    try:
        row: Any = json.loads(line)
        return _Row(
            float(row["timestamp"]),
            int(row["input_length"]),
            int(row["output_length"]),
            tuple(int(hash_id) for hash_id in row.get("hash_ids", ())),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}, line {number}: {type(error).__name__}: {error}",
            stage="bench",
            remedy="a line is an object with timestamp (ms), input_length, output_length and hash_ids",
        ) from error


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {file}: {error}", stage="bench") from error
