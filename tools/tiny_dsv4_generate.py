"""Generation with the small model by recomputing everything: slow, cache-free, the plain truth to compare with.

Shape suffixes: T tokens, N streams, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.tiny_dsv4_model import TinyDeepseekV4

# The NextN layer sees one window, so this many rows are enough to draft exactly.
_DRAFT_ROWS_IN_WINDOWS = 2


@dataclass(frozen=True)
class Generation:
    """New tokens, and how many came out of each verify step (1 .. drafts + 1)."""

    tokens: tuple[int, ...]
    emitted_per_step: tuple[int, ...]

    @property
    def acceptance_length_tokens(self) -> float:
        """Mean tokens emitted a verify step."""
        return sum(self.emitted_per_step) / len(self.emitted_per_step)


@torch.no_grad()
def run_target(model: TinyDeepseekV4, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Streams [T, N, D] and logits [T, V] of one sequence of any length."""
    window = model.config.sliding_window
    padded = list(ids) + [0] * (
        -len(ids) % window
    )  # causal: what follows cannot change what precedes
    x = model.streams(torch.tensor([padded]))[:, : len(ids)]
    return x[0], model.logits(x)[0]


@torch.no_grad()
def draft_chain(model: TinyDeepseekV4, x_TND: Tensor, ids: Sequence[int], drafts: int) -> list[int]:
    """Greedy drafts after `ids`; x holds the target's streams of all of `ids` but the newest."""
    known = x_TND.shape[0]
    assert known == len(ids) - 1
    window = model.config.sliding_window
    rows = window * _DRAFT_ROWS_IN_WINDOWS
    first = max(0, known + drafts - rows)
    last = known - 1 - first
    streams = torch.zeros(1, rows, *x_TND.shape[1:])
    streams[0, : last + 1] = x_TND[first:]
    following = torch.zeros(1, rows, dtype=torch.int64)
    following[0, : last + 1] = torch.tensor(ids[first + 1 :])
    chain: list[Tensor] = []
    drafted: list[int] = []
    for depth in range(drafts):
        streams = model.draft(streams, following, chain)
        row = last + depth
        drafted.append(int(model.draft_logits(streams[:, row : row + 1])[0, 0].argmax()))
        if depth + 1 < drafts:
            following[0, row + 1] = drafted[-1]
            streams = streams.roll(1, dims=1)
    return drafted


def generate(
    model: TinyDeepseekV4,
    prompt: Sequence[int],
    new_tokens: int,
    drafts: int = 3,
    temperature: float = 0.0,
    seed: int = 0,
) -> Generation:
    """Draft, verify, accept. The draft proposes one token, so keeping it exactly when the target's own choice
    equals it is lossless at any temperature."""
    generator = torch.Generator().manual_seed(seed)
    x, logits = run_target(model, prompt)
    ids = [*prompt, _choose(logits[-1], temperature, generator)]
    emitted: list[int] = []
    while len(ids) - len(prompt) < new_tokens:
        drafted = draft_chain(model, x, ids, drafts)
        x, logits = run_target(model, [*ids, *drafted])
        base = len(ids) - 1
        accepted = 0
        for depth in range(drafts + 1):
            token = _choose(logits[base + depth], temperature, generator)
            ids.append(token)
            if depth == drafts or token != drafted[depth]:
                break
            accepted += 1
        emitted.append(accepted + 1)
        x = x[: len(ids) - 1]
    return Generation(tuple(ids[len(prompt) :]), tuple(emitted))


def _choose(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities = torch.softmax(logits_V / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
