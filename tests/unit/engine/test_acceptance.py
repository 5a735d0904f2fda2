"""Accepted counts of the toy engine against a from-scratch account of chain drafting, without pools
or batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sluice.config import EngineConfig, PoolMode
from sluice.types import RequestId
from tests.unit.engine.driving import run_all
from tests.unit.engine.toy_model import (
    RATIO,
    WINDOW,
    ToyDraft,
    mix,
    prompt_of,
    request,
    toy_core,
)

STEPS, MAX_TOKENS = 3, 24


def _state(tokens: Sequence[int], p: int) -> int:
    """The target's state after reading tokens ``0..p``."""
    window = [mix(tokens[q], q) for q in range(max(0, p - WINDOW + 1), p + 1)]
    blocks = [
        mix(*(t + 1 for t in tokens[w * RATIO : (w + 1) * RATIO])) for w in range((p + 1) // RATIO)
    ]
    return mix(*window, *blocks)


def _say(draft: ToyDraft, output: int) -> int:
    return int(draft.table[output].argmax())


def _proposal(tokens: Sequence[int], prompt_tokens: int, n: int) -> list[int]:
    """Drafts for positions n + 1 .. when tokens 0..n are known and rows 0..n-1 are true."""
    draft = ToyDraft()
    low = max(0, prompt_tokens - WINDOW)
    rows = {t: mix(_state(tokens, t), tokens[t + 1]) for t in range(low, n)}
    output, drafts, t = _output(rows, low, n - 1), [], n
    while len(drafts) < STEPS:
        drafts.append(_say(draft, output))
        rows[t] = mix(output, drafts[-1])
        output = _output(rows, low, t)
        t += 1
    return drafts


def _output(rows: dict[int, int], low: int, t: int) -> int:
    return mix(*(rows[q] for q in range(max(low, t - WINDOW + 1), t + 1)))


def _accepted(prompt_tokens: int, tokens: Sequence[int]) -> list[int | None]:
    counts: list[int | None] = [None]
    n = prompt_tokens
    while (remaining := len(tokens) - n - 1) > 0:
        drafts = _proposal(tokens, prompt_tokens, n)[: min(STEPS, remaining - 1)]
        right = 0
        while right < len(drafts) and drafts[right] == tokens[n + 1 + right]:
            right += 1
        counts.append(right if drafts else None)
        n += right + 1
    return counts


@pytest.mark.parametrize("mode", list(PoolMode))
@pytest.mark.parametrize("budget", [5, 512])
def test_accepted_counts_are_those_of_true_streams_and_true_rows(
    mode: PoolMode, budget: int
) -> None:
    requests = [request(f"r{n}", prompt_of(n), max_tokens=MAX_TOKENS) for n in (1, 5, 8, 17, 40)]
    stories = run_all(toy_core(mode=mode, config=EngineConfig(max_batch_tokens=budget)), requests)
    total = 0
    for one in requests:
        story = stories[RequestId(one.request_id)]
        expected = _accepted(len(one.prompt), [*one.prompt, *story.tokens])
        assert story.accepted == expected
        total += sum(n or 0 for n in expected)
    assert total >= 5
