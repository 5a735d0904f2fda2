"""The plan of one step and its result: what the scheduler and the runner say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.errors import SluiceError
from sluice.pools.backup import EarlierState
from sluice.pools.base import RequestTables
from sluice.spec.steering import Steering
from sluice.types import Logprobs, RequestId, Sampling


@dataclass(frozen=True)
class DecodeWork:
    """Verify ``drafts`` proposals after ``newest_token``, which stands at position
    ``tables.kv_len``.
    """

    request_id: RequestId
    tables: RequestTables
    newest_token: int
    drafts: int
    sampling: Sampling
    steering: Steering | None = None

    @property
    def num_tokens(self) -> int:
        return self.drafts + 1


@dataclass(frozen=True)
class PrefillWork:
    """Compute prompt rows ``[start, stop)``."""

    request_id: RequestId
    tables: RequestTables
    prompt: tuple[int, ...]
    start: int
    stop: int
    sampling: Sampling
    steering: Steering | None = None

    @property
    def final(self) -> bool:
        return self.stop == len(self.prompt)


@dataclass(frozen=True)
class StepPlan:
    decodes: tuple[DecodeWork, ...]
    prefills: tuple[PrefillWork, ...]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        decodes = tuple(work.request_id for work in self.decodes)
        return decodes + tuple(work.request_id for work in self.prefills)

    def describe(self) -> str:
        """One line for the log when a step fails: who, where, how much. No token values: prompts
        are private.
        """
        decodes = [f"{w.request_id}@{w.tables.kv_len}+{w.num_tokens}" for w in self.decodes]
        prefills = [f"{w.request_id}[{w.start}:{w.stop}/{len(w.prompt)}]" for w in self.prefills]
        return f"decode {' '.join(decodes) or '-'}; prefill {' '.join(prefills) or '-'}"


@dataclass(frozen=True)
class DecodeResult:
    """``accepted`` drafts stand; ``token_ids`` are those plus one. ``drafted`` is how many were
    verified. ``logprobs`` has one entry a token, when asked for; ``reached`` is state to keep for reuse.
    ``failure``: why the request can't go on although its step went well (its grammar is stuck).
    """

    token_ids: tuple[int, ...]
    accepted: int
    drafted: int
    logprobs: tuple[Logprobs, ...] = ()
    reached: EarlierState | None = None
    failure: SluiceError | None = None

    @classmethod
    def first(cls, token_id: int, logprobs: Logprobs | None) -> DecodeResult:
        """A prompt's first token, which no draft proposed."""
        return cls((token_id,), 0, 0, () if logprobs is None else (logprobs,))


@dataclass(frozen=True)
class PrefillResult:
    """``first_token`` comes with the final chunk, its logprobs when asked for. ``prompt_logprobs`` are those of
    tokens ``start + 1 .. stop`` of the prompt: a chunk's last row scores the next chunk's first token.
    ``failure`` as of ``DecodeResult``.
    """

    first_token: int | None = None
    first_logprobs: Logprobs | None = None
    prompt_logprobs: tuple[Logprobs, ...] = ()
    failure: SluiceError | None = None


@dataclass(frozen=True)
class StepResult:
    """Results in the plan's order."""

    decodes: tuple[DecodeResult, ...]
    prefills: tuple[PrefillResult, ...]
