"""The alarm for a draft that is of no use: acceptance near one token a step, for many steps, with hysteresis.

A lost or garbled draft state changes no answer and fails no request; this is where it shows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sluice.rpc.messages import Acceptance
from sluice.telemetry.logging import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class AcceptanceLimits:
    """``collapse_below`` and ``recover_above`` are mean tokens a verify step; 1 means that no draft is accepted.

    Nothing is said before ``min_steps``; the mean is over the last ``window_steps``.
    """

    collapse_below: float = 1.1
    recover_above: float = 1.25
    min_steps: int = 200
    window_steps: int = 1000


class AcceptanceWatch:
    """Fed with every verify step of the pod, on the event loop. Constant time a step."""

    def __init__(self, drafts: bool, limits: AcceptanceLimits | None = None) -> None:
        self._drafts = drafts
        self._limits = limits or AcceptanceLimits()
        self._recent: deque[int] = deque(maxlen=self._limits.window_steps)
        self._accepted = 0  # sum of _recent
        self.collapsed = False
        self.alarms = 0

    def step(self, accepted_drafts: int) -> None:
        if len(self._recent) == self._limits.window_steps:
            self._accepted -= self._recent[0]
        self._recent.append(accepted_drafts)
        self._accepted += accepted_drafts
        if not self._drafts or len(self._recent) < self._limits.min_steps:
            return
        mean = self.recent_tokens
        if not self.collapsed and mean < self._limits.collapse_below:
            self.collapsed = True
            self.alarms += 1
            log.warning(
                "acceptance_collapsed",
                recent_tokens=round(mean, 3),
                steps=len(self._recent),
                remedy="does the agreement carry the draft's components? see docs/operations.md",
            )
        elif self.collapsed and mean > self._limits.recover_above:
            self.collapsed = False
            log.info("acceptance_recovered", recent_tokens=round(mean, 3))

    @property
    def recent_tokens(self) -> float:
        """Mean tokens a verify step; NaN before the first."""
        return 1 + self._accepted / len(self._recent) if self._recent else float("nan")

    def status(self) -> Acceptance:
        return Acceptance(
            drafts=self._drafts,
            recent_tokens=self.recent_tokens if self._recent else 0.0,
            steps=len(self._recent),
            collapsed=self.collapsed,
        )
