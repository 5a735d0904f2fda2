"""What the small models' measuring scripts share: prompts from held-out text, and exact-answer rates."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer
from torch import Tensor

from tools.synthetic import Question
from tools.tiny_tokenizer import BOS_ID

SEED = 7
PROMPT_CHARS = 160
FILLER_CHARS = (0, 120, 300, 600, 900)

# Logits [T, V] of each of several id sequences.
LogitsOf = Callable[[Sequence[Sequence[int]]], Sequence[Tensor]]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids with the start token, as serving does it."""
    return [BOS_ID, *tokenizer.encode(text, add_special_tokens=False).ids]


def exact_rate(logits_of: LogitsOf, tokenizer: Tokenizer, questions: Sequence[Question]) -> float:
    """Share of questions whose whole answer is the greedy continuation."""
    prompts = [encode(tokenizer, q.prompt) for q in questions]
    answers = [tokenizer.encode(q.answer, add_special_tokens=False).ids for q in questions]
    logits = logits_of([[*p, *a] for p, a in zip(prompts, answers, strict=True)])
    right = [
        rows[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
        for prompt, answer, rows in zip(prompts, answers, logits, strict=True)
    ]
    return sum(right) / len(right)


def mean_distance_tokens(tokenizer: Tokenizer, questions: Sequence[Question]) -> float:
    """How many tokens lie between an answer's source and the question, on average."""
    counts = [len(encode(tokenizer, q.prompt[-q.distance_chars :])) for q in questions]
    return sum(counts) / len(counts)


def prose_prompts(tokenizer: Tokenizer, paragraphs: Sequence[str], count: int) -> list[list[int]]:
    """Openings of held-out paragraphs, cut at a word."""
    rng = random.Random(SEED)
    long = [p for p in paragraphs if len(p) > 2 * PROMPT_CHARS]
    return [encode(tokenizer, p[:PROMPT_CHARS].rsplit(" ", 1)[0]) for p in rng.sample(long, count)]
