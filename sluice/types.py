"""The words every part of Sluice shares: ids, requests, sampling, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

RequestId = NewType("RequestId", str)
AttemptId = NewType("AttemptId", str)  # one try at one request on one pair; never reused
Epoch = NewType("Epoch", str)  # one life of one pod process; peer knowledge is keyed by it


class Role(Enum):
    """What an engine does with a request."""

    PREFILL = "prefill"  # reads the prompt, hands state and first token over
    DECODE = "decode"  # adopts a prompt's state, writes the answer
    AGGREGATED = "aggregated"  # does both in one process; the oracle


class FinishReason(Enum):
    """Why a request ended (OpenAI's names where it has one)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class GrammarKind(Enum):
    """In which language a grammar's text is written."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"  # any JSON object; its text is empty
    REGEX = "regex"
    LARK = "lark"  # llguidance's dialect


@dataclass(frozen=True)
class Grammar:
    """What an answer's text must match as a whole."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. ``temperature == 0`` is greedy.

    ``seed`` makes a request reproducible: draws are keyed by (seed, position, purpose), so that the
    same request gives the same tokens in aggregated and disaggregated mode, whatever it is batched with.
    ``spec.steering`` says in which order the rest is applied.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0  # 0 = off
    min_tokens: int = 0  # no stop token before so many
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    logprobs: int | None = None  # how many alternatives beside each token's own; None = no logprobs
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    grammar: Grammar | None = None


@dataclass(frozen=True)
class Request:
    """One prompt to continue. ``prompt`` holds token ids, at least one."""

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class TokenLogprob:
    """One candidate for a position, and its natural-log probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class Logprobs:
    """One position: ``logprob`` of the token that stands there, and the best candidates, best first.

    Of the model's own distribution: before penalties, bias, grammar and temperature.
    """

    logprob: float
    top: tuple[TokenLogprob, ...] = ()


PromptLogprobs = tuple[Logprobs | None, ...]  # one a token; the first follows nothing and has None


@dataclass(frozen=True)
class TokenEvent:
    """New tokens of one request, in order.

    ``accepted_drafts`` is the number of draft tokens accepted by the verify step that made this event:
    ``None`` for a prompt's first token and for steps without a draft; else ``len(token_ids)`` is at most
    ``accepted_drafts + 1`` (fewer when a stop token or the length limit cut the step short).
    ``logprobs`` has one entry a token when they were asked for; ``prompt_logprobs`` comes with an aggregated
    request's first event.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    accepted_drafts: int | None = None
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
