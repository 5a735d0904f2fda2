"""Training rows: prose windows and packed synthetic documents, as ids with a loss weight per token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.synthetic import Kind, SyntheticDocument, random_document
from tools.tiny_tokenizer import BOS_ID, EOS_ID

# Random words cannot be predicted, so they would only drown the answers; a little weight keeps the format known.
WEIGHTS = {Kind.TEXT: 1.0, Kind.NOISE: 0.1, Kind.ANSWER: 2.0}
CHARS_PER_TOKEN = 2


@dataclass(frozen=True)
class Batch:
    """ids and weight are [B, T]; `answers` marks synthetic answer tokens."""

    ids: Tensor
    weight: Tensor
    answers: Tensor


def encode_paragraphs(tokenizer: Tokenizer, paragraphs: Sequence[str]) -> Tensor:
    """All paragraphs as one id sequence, a newline after each."""
    encodings = tokenizer.encode_batch([p + "\n" for p in paragraphs], add_special_tokens=False)
    return torch.tensor([i for e in encodings for i in e.ids], dtype=torch.int16)


class RowSource:
    """Makes seeded batches; the same seed and step always give the same rows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prose: Sequence[str],
        seed: int,
        synthetic_share: float = 0.25,
        copy_share: float = 0.3,
    ) -> None:
        self.tokenizer, self.prose, self.seed = tokenizer, prose, seed
        self.synthetic_share, self.copy_share = synthetic_share, copy_share
        self.flat = (
            encode_paragraphs(tokenizer, prose) if prose else torch.zeros(0, dtype=torch.int16)
        )
        self._cache: dict[str, list[int]] = {}

    def batch(self, step: int, rows: int, tokens: int, reach: float) -> Batch:
        """`rows` x `tokens`; `reach` in (0, 1] bounds the length of synthetic documents."""
        rng = random.Random(f"{self.seed}:{step}")
        share = self.synthetic_share if self.prose else 1.0
        made = [
            self._synthetic_row(rng, tokens, reach)
            if rng.random() < share
            else self._prose_row(rng, tokens)
            for _ in range(rows)
        ]
        ids, weights, answers = zip(*made, strict=True)
        return Batch(torch.tensor(ids), torch.tensor(weights), torch.tensor(answers))

    def _prose_row(
        self, rng: random.Random, tokens: int
    ) -> tuple[list[int], list[float], list[bool]]:
        start = rng.randrange(len(self.flat) - tokens)
        ids = self.flat[start : start + tokens].tolist()
        if rng.random() < 0.7:
            ids = [BOS_ID, *ids[:-1]]
        return ids, [1.0] * tokens, [False] * tokens

    def _synthetic_row(
        self, rng: random.Random, tokens: int, reach: float
    ) -> tuple[list[int], list[float], list[bool]]:
        ids: list[int] = []
        weights: list[float] = []
        answers: list[bool] = []
        while len(ids) < tokens:
            longest = max(120, int(tokens * CHARS_PER_TOKEN * reach))
            document = random_document(
                rng, rng.randrange(80, longest + 1), self.prose, self.copy_share
            )
            self._append(document, ids, weights, answers)
        return ids[:tokens], weights[:tokens], answers[:tokens]

    def _append(
        self, document: SyntheticDocument, ids: list[int], weights: list[float], answers: list[bool]
    ) -> None:
        ids.append(BOS_ID)
        weights.append(1.0)
        answers.append(False)
        for segment in document.segments:
            part = self._encode(segment.text)
            ids += part
            weights += [WEIGHTS[segment.kind]] * len(part)
            answers += [segment.kind is Kind.ANSWER] * len(part)
        ids.append(EOS_ID)
        weights.append(1.0)
        answers.append(False)

    def _encode(self, text: str) -> list[int]:
        if len(text) > 16:
            return list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        if text not in self._cache:
            self._cache[text] = list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        return self._cache[text]
