"""The plan of one step and its result: what the scheduler and the runner say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.pools.base import RequestTables
from sluice.types import RequestId, Sampling


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
    verified.
    """

    token_ids: tuple[int, ...]
    accepted: int
    drafted: int


@dataclass(frozen=True)
class StepResult:
    """Results in the plan's order; a prefill's is its first token after a final chunk."""

    decodes: tuple[DecodeResult, ...]
    first_tokens: tuple[int | None, ...]
