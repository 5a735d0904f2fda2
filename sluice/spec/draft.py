"""What the engine asks of a drafter: propose tokens for running requests, observe what the target
really computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sluice.models.base import Segment
from sluice.pools.base import RequestTables
from sluice.types import Sampling


@dataclass(frozen=True)
class DraftTask:
    """Propose ``steps`` tokens for positions ``kv_len + 1 ..`` (the token at ``kv_len`` is known,
    not yet in state).
    """

    tables: RequestTables
    steps: int
    sampling: Sampling
    newest_token: int  # the known token at ``kv_len``; a block draft starts from it


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens; ``q_SV`` is the distribution each was drawn from, or None when they are
    argmaxes.
    """

    token_ids: tuple[int, ...]
    q_SV: Tensor | None


class Drafter(Protocol):
    """Keeps no request state outside the pools, so that a transferred request drafts as if it had
    never moved.
    """

    @property
    def algorithm(self) -> str:
        """Its name in ``layout.SpecIdentity``."""
        ...

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Target layers whose residual streams ``observe`` reads instead of the target's result; none
        for a draft that reads the result.
        """
        ...

    def propose(self, tasks: Sequence[DraftTask]) -> list[Proposal]:
        """One proposal a task, in order. Writes speculative draft rows above ``kv_len``; they are
        rewritten later.
        """
        ...

    def observe(self, segments: Sequence[Segment], hidden: Tensor) -> None:
        """Bring the draft's state up to date.

        ``hidden`` holds the target's rows for all segments' positions, end to end (its result, or
        what ``HiddenCapture`` collected from ``captured_layers``); ``token_ids`` of
        a segment are the tokens AFTER its positions. The last row of each segment becomes what the
        next proposal starts from.
        """
        ...
