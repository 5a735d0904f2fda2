"""Synthetic documents whose next token depends on far context: key-value recall and span copying."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

KEYS = string.ascii_uppercase
# Common words of the corpus, so that " word" is one token of the small vocabulary.
WORDS = (
    "not say day they when very you said LORD thy thee thou were will God from know him she them "
    "son man king upon there her"
).split()
_FILLER_WORDS = "and the of in to that which with upon from for was not they".split()
_MAX_FILLER_PIECE_CHARS = 220


class Kind(Enum):
    """What a piece of a document is worth to the loss and to a check."""

    TEXT = "text"
    """Ordinary text or fixed punctuation."""
    NOISE = "noise"
    """Random by construction: no model can predict it."""
    ANSWER = "answer"
    """Determined by earlier text: an exact check."""


@dataclass(frozen=True)
class Segment:
    """A piece of text of one kind; pieces are tokenised one by one."""

    text: str
    kind: Kind


@dataclass(frozen=True)
class SyntheticDocument:
    """Segments in order; the text is their concatenation."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """The whole document."""
        return "".join(segment.text for segment in self.segments)


@dataclass(frozen=True)
class Question:
    """A prompt with exactly one right continuation."""

    prompt: str
    answer: str
    distance_chars: int


def filler_text(rng: random.Random, chars: int, prose: Sequence[str]) -> str:
    """About `chars` characters of distraction: real paragraphs when given, else function words."""
    pieces: list[str] = []
    remaining = chars
    while remaining > 0:
        if prose:
            paragraph = rng.choice(prose)
            start = paragraph.find(" ", rng.randrange(max(1, len(paragraph) // 2))) + 1
            piece = paragraph[start : start + min(remaining, _MAX_FILLER_PIECE_CHARS)]
            piece = piece[: piece.rfind(" ")] if " " in piece else piece
        else:
            piece = " ".join(
                rng.choice(_FILLER_WORDS) for _ in range(max(1, min(remaining, 80) // 4))
            )
        pieces.append(piece)
        remaining -= len(piece) + 1
    return "\n".join(pieces)


def _definition(key: str, value: str) -> list[Segment]:
    return [
        Segment(f"{key}=", Kind.NOISE),
        Segment(f" {value}", Kind.NOISE),
        Segment("\n", Kind.TEXT),
    ]


def _query(key: str, value: str) -> list[Segment]:
    return [
        Segment(f"{key}?", Kind.NOISE),
        Segment(f" {value}", Kind.ANSWER),
        Segment("\n", Kind.TEXT),
    ]


def _filler_segments(rng: random.Random, chars: int, prose: Sequence[str]) -> list[Segment]:
    if chars <= 0:
        return []
    return [Segment(filler_text(rng, chars, prose) + "\n", Kind.TEXT if prose else Kind.NOISE)]


def recall_document(
    rng: random.Random, pairs: int, queries: int, filler_chars: int, prose: Sequence[str] = ()
) -> SyntheticDocument:
    """`pairs` lines "K= word", filler, then `queries` lines "K? word" in random order."""
    keys = rng.sample(KEYS, pairs)
    values = {key: rng.choice(WORDS) for key in keys}
    segments: list[Segment] = []
    for key in keys:
        segments += _definition(key, values[key])
    segments += _filler_segments(rng, filler_chars, prose)
    for _ in range(queries):
        key = rng.choice(keys)
        segments += _query(key, values[key])
    return SyntheticDocument(tuple(segments))


def copy_document(
    rng: random.Random, words: int, repeats: int, filler_chars: int, prose: Sequence[str] = ()
) -> SyntheticDocument:
    """A span "[ w1 w2 ... ]", filler, then the same span again `repeats` times."""
    span = [rng.choice(WORDS) for _ in range(words)]
    segments = [Segment("[", Kind.TEXT)]
    segments += [Segment(f" {word}", Kind.NOISE) for word in span]
    segments.append(Segment("]\n", Kind.TEXT))
    for _ in range(repeats):
        segments += _filler_segments(rng, filler_chars, prose)
        # The first word of a repeat is answerable too: each document holds a single span.
        segments += [Segment("[", Kind.TEXT), *(Segment(f" {word}", Kind.ANSWER) for word in span)]
        segments.append(Segment("]\n", Kind.TEXT))
    return SyntheticDocument(tuple(segments))


def random_document(
    rng: random.Random, max_chars: int, prose: Sequence[str] = (), copy_share: float = 0.3
) -> SyntheticDocument:
    """A recall or copy document of at most roughly `max_chars`, with a random distance."""
    body_chars = rng.randrange(max_chars // 3, max(max_chars // 3 + 1, int(max_chars * 0.7)))
    filler = rng.choice((0, rng.randrange(max_chars - body_chars + 1)))
    if rng.random() < 1 - copy_share:
        lines = max(4, body_chars // 8)
        pairs = min(len(KEYS), rng.randrange(2, max(3, lines // 2 + 1)))
        return recall_document(rng, pairs, max(2, lines - pairs), filler, prose)
    words = rng.randrange(4, max(5, min(40, body_chars // 14)))
    repeats = max(1, body_chars // (7 * words) - 1)
    return copy_document(rng, words, repeats, filler // repeats, prose)


def recall_question(
    rng: random.Random, pairs: int, filler_chars: int, prose: Sequence[str] = ()
) -> Question:
    """A recall prompt ending in "K?", with the single word that answers it."""
    document = recall_document(rng, pairs, 1, filler_chars, prose)
    answer = next(segment for segment in document.segments if segment.kind is Kind.ANSWER)
    prompt = document.text[: document.text.rindex(answer.text)]
    defined_at = prompt.index(f"{prompt[-2]}={answer.text}\n")
    return Question(prompt, answer.text, len(prompt) - defined_at)


def copy_question(
    rng: random.Random, words: int, filler_chars: int, prose: Sequence[str] = ()
) -> Question:
    """A copy prompt ending in "[", with the whole span as its answer."""
    document = copy_document(rng, words, 1, filler_chars, prose)
    answer = "".join(s.text for s in document.segments if s.kind is Kind.ANSWER)
    prompt = document.text[: -len(answer + "]\n")]
    return Question(prompt, answer, len(prompt) - 1)
