"""How many of a block's drafts are worth verifying; static: all of them.

Confidence-scheduled planners (DSpark, arXiv 2607.05147) weigh each draft's chance to survive against
the cost of a wider verify step. A planner may only shorten a proposal from its end, and may decide to
cut before draft s by confidences up to s only: those of later drafts depend on the token drawn at s,
and dropping a token for what it is would bias the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Planner(Protocol):
    """Chooses, for every request of a step, how many drafts to verify."""

    @property
    def wants_confidence(self) -> bool:
        """Whether ``lengths`` looks at confidences; if not, none are computed."""
        ...

    def lengths(self, confidence_BS: Tensor | None, limits: Sequence[int]) -> list[int]:
        """One count a request, ``0 .. limits[i]``.

        ``confidence_BS``: probability that a draft stands if those before it do; None where the draft
        has no such head, or nobody wants it.
        """
        ...


class StaticPlanner:
    """Always the whole block, up to what the request can still use."""

    wants_confidence = False

    def lengths(self, confidence_BS: Tensor | None, limits: Sequence[int]) -> list[int]:
        return list(limits)
