"""Log probabilities in the shapes of both endpoints."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence

from pydantic import BaseModel

from sluice.rpc.messages import Tokens
from sluice.text.tokenizer import ModelTokenizer
from sluice.types import Logprobs, PromptLogprobs

_LOWEST = -9999.0  # JSON has no infinity; vLLM's and OpenAI's stand-in


class TokenScore(BaseModel):
    """``token`` is ``bytes`` as text, with U+FFFD for what is only part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class AnsweredToken(TokenScore):
    top_logprobs: list[TokenScore]


class ChatLogprobs(BaseModel):
    """One entry a token: of the answer with its markup, reasoning and calls."""

    content: list[AnsweredToken]
    refusal: None


class TextLogprobs(BaseModel):
    """``top_logprobs`` always has the token itself; ``text_offset`` counts characters from the text's start."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptScore(BaseModel):
    """``rank`` counts from 1; null for a token that is not among the alternatives."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptScores = list[dict[str, PromptScore] | None]
Scored = tuple[int, Logprobs | None]


class Speller:
    """How tokens are spelled in logprobs; as ``token_id:7`` when the client asked for ids."""

    def __init__(self, tokenizer: ModelTokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat(self, steps: Sequence[Tokens]) -> ChatLogprobs:
        content = [
            AnsweredToken(
                **self._score(token, scores.logprob).model_dump(),
                top_logprobs=[self._score(top.token_id, top.logprob) for top in scores.top],
            )
            for token, scores in scored(steps)
            if scores is not None
        ]
        return ChatLogprobs(content=content, refusal=None)

    def text(self, tokens: Sequence[Scored], offsets: Offsets) -> TextLogprobs:
        return TextLogprobs(
            text_offset=[offsets.push(token) for token, _ in tokens],
            token_logprobs=[None if s is None else clamped(s.logprob) for _, s in tokens],
            tokens=[self._text(token) for token, _ in tokens],
            top_logprobs=[None if s is None else self._best(token, s) for token, s in tokens],
        )

    def prompt(self, ids: Sequence[int], positions: PromptLogprobs) -> PromptScores:
        """vLLM's shape: by token id, each with its rank."""
        return [
            None if scores is None else self._ranked(token, scores)
            for token, scores in zip(ids, positions, strict=True)
        ]

    def _best(self, token: int, scores: Logprobs) -> dict[str, float]:
        """By spelling; of two tokens that are spelled alike the better one."""
        best: dict[str, float] = {}
        for top in scores.top:
            best.setdefault(self._text(top.token_id), clamped(top.logprob))
        best.setdefault(self._text(token), clamped(scores.logprob))
        return best

    def _ranked(self, token: int, scores: Logprobs) -> dict[str, PromptScore]:
        ranked = {
            str(top.token_id): self._prompt_score(top.token_id, top.logprob, rank)
            for rank, top in enumerate(scores.top, 1)
        }
        if str(token) not in ranked:
            ranked[str(token)] = self._prompt_score(token, scores.logprob, None)
        return ranked

    def _prompt_score(self, token: int, logprob: float, rank: int | None) -> PromptScore:
        return PromptScore(logprob=clamped(logprob), rank=rank, decoded_token=self._text(token))

    def _score(self, token: int, logprob: float) -> TokenScore:
        return TokenScore(
            token=self._text(token),
            logprob=clamped(logprob),
            bytes=list(self._tokenizer.spelled_bytes(token)),
        )

    def _text(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        return self._tokenizer.spelled_bytes(token).decode(errors="replace")


class Offsets:
    """Where each token begins in one growing text, which shows special tokens or doesn't."""

    def __init__(self, tokenizer: ModelTokenizer, shown: frozenset[int], text: str = "") -> None:
        """``text`` is there from the start: a prompt that may spell special tokens out."""
        self._tokenizer = tokenizer
        self._shown = shown
        self._text = text
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._chars = 0

    def push(self, token: int) -> int:
        """Characters before ``token``."""
        before = self._chars
        plain = self._tokenizer.token_bytes(token)
        if not plain:
            spelled = self._tokenizer.spelled_bytes(token)
            there = self._text.startswith(spelled.decode(errors="replace"), before)
            plain = spelled if token in self._shown or (spelled and there) else b""
        self._chars += len(self._utf8.decode(plain))
        return before


def scored(steps: Sequence[Tokens]) -> list[Scored]:
    """Tokens of steps with their logprobs, or None where a pod sent none."""
    return [pair for step in steps for pair in itertools.zip_longest(step.token_ids, step.logprobs)]


def clamped(logprob: float) -> float:
    return max(logprob, _LOWEST)
