"""``/status.json``: what the router knows of its fleet and of its last answers. Seconds and bytes throughout."""

from __future__ import annotations

from pydantic import BaseModel


class Component(BaseModel):
    name: str
    bytes: int


class Pool(BaseModel):
    """Items of one index space: free + held + quarantined + cached == total. ``components`` have rows in it."""

    space: str
    total: int
    free: int
    held: int
    quarantined: int
    cached: int
    components: list[Component]


class Drafting(BaseModel):
    """``recent_tokens``: mean tokens of the last ``steps`` verify steps, 1 = no draft is accepted."""

    recent_tokens: float
    steps: int
    collapsed: bool


class Pod(BaseModel):
    """``state``: ready, or not ready with the reason. A prefill pod is seen through a decode pod's pings."""

    role: str
    address: str
    name: str
    ready: bool
    reason: str
    epoch: str
    queued: int
    running: int
    capacity: int
    retractions: int
    pools: list[Pool]
    drafting: Drafting | None


class Crossed(BaseModel):
    component: str
    bytes: int
    bytes_per_s: float  # 0 = not measured


class Canary(BaseModel):
    age_s: float
    seconds: float
    failure: str  # empty = it passed
    transport: str  # empty = unknown
    components: list[Crossed]


class Pair(BaseModel):
    """One cell of the agreement matrix."""

    decode: str
    prefill: str
    state: str
    reason: str
    usable: bool
    breaker: str
    digest: str
    in_flight: int
    quarantined_attempts: int
    canary: Canary | None


class Span(BaseModel):
    part: str
    seconds: float


class Answer(BaseModel):
    """One answer to one prompt, without a word of either.

    ``spans`` are the parts of the time to the first token, in order, then "decode"; for an answer without a first
    token there is one, "waiting".
    """

    request_id: str
    attempt_id: str
    attempts: int
    decode: str
    prefill: str
    started_unix_s: float
    outcome: str  # running, stop, length, cancelled, or an error's code
    spans: list[Span]
    ttft_s: float | None
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    acceptance_tokens: float | None  # mean tokens a verify step


class Totals(BaseModel):
    """Rates are of the last minute, quantiles of the last thousand answers."""

    answers: int
    failures: int
    running: int
    waiting: int
    answers_per_s: float
    tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None


class Status(BaseModel):
    now_unix_s: float
    started_unix_s: float
    model: str
    ready: bool
    alarms: list[str]
    totals: Totals
    pods: list[Pod]
    pairs: list[Pair]
    answers: list[Answer]
