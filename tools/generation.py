"""What a small model wrote with its draft, and how a token is chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Generation:
    """Generated tokens, and how many each verify step emitted."""

    tokens: tuple[int, ...]
    emitted_per_step: tuple[int, ...]

    @property
    def acceptance_length_tokens(self) -> float:
        """Mean tokens emitted a verify step."""
        return sum(self.emitted_per_step) / len(self.emitted_per_step)


def choose(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    """The best token at temperature 0, else a draw."""
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities = torch.softmax(logits_V / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
