"""What negotiation yields: an agreement (what will be sent) or a refusal (every reason why not)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sluice.errors import LayoutRefused
from sluice.layout.component import Component

FOLLOWS_FROM = "follows from "  # how the explanation of an effect begins; its cause's path follows


class Severity(Enum):
    """What a difference between two layouts means."""

    FATAL = "fatal"  # state read under the other layout would be wrong: nothing may move
    CONVERTIBLE = "convertible"  # the plan handles it
    HARMLESS = "harmless"  # says nothing about a request's state


@dataclass(frozen=True)
class Mismatch:
    """One difference, or one broken rule, with both pods' values as text."""

    path: str  # "geometry.page_tokens", "components[draft.swa].entries[*].dtype"
    prefill_value: str
    decode_value: str
    severity: Severity
    explanation: str
    remedy: str  # which setting to change on which pod; empty when nothing needs to change

    @property
    def cause(self) -> str:
        """Path of the difference that this one follows from; empty if it stands by itself."""
        text = self.explanation
        return text.removeprefix(FOLLOWS_FROM) if text.startswith(FOLLOWS_FROM) else ""


class DraftHandover(Enum):
    """What happens to the draft's state under an agreement."""

    NONE = "none"  # neither pod drafts
    SENT = "sent"  # both draft: the draft's components are sent like any other
    WITHHELD = "withheld"  # only decode drafts: it marks adopted draft windows invalid
    UNUSED = "unused"  # only prefill drafts: its draft state stays where it is


@dataclass(frozen=True)
class ComponentPlan:
    """One component that will be sent, as each pod has it.

    Rows are paired one to one in logical order (``span.pair_runs``); each side turns positions into
    rows with its own component, and checks the peer's rows against the peer's ``num_rows``.
    """

    name: str
    prefill: Component
    decode: Component


@dataclass(frozen=True)
class Agreement:
    """Two layouts that fit. ``digest`` is the same whoever computes it."""

    digest: str
    plans: tuple[ComponentPlan, ...]  # in the order of sending and of digests
    draft: DraftHandover
    notes: tuple[Mismatch, ...]  # convertible and harmless differences
    ranks: tuple[int, int] = (1, 1)  # of prefill, of decode

    @property
    def components(self) -> tuple[str, ...]:
        """Names of what will be sent, in order."""
        return tuple(plan.name for plan in self.plans)

    @property
    def draft_valid(self) -> bool:
        """Whether a decode pod may read draft state of an adopted request's prompt."""
        return self.draft is not DraftHandover.WITHHELD


@dataclass(frozen=True)
class Refusal:
    """Every mismatch found; at least one is fatal."""

    mismatches: tuple[Mismatch, ...]

    @property
    def fatal(self) -> tuple[Mismatch, ...]:
        return tuple(m for m in self.mismatches if m.severity is Severity.FATAL)

    def causes(self) -> tuple[str, ...]:
        """Paths of the fatal differences that don't follow from another one."""
        return tuple(m.path for m in self.fatal if not m.cause)

    def summary(self, limit: int = 4) -> str:
        """One line for logs and status: how many, and the first few with both values."""
        fatal = [m for m in self.fatal if not m.cause]
        shown = "; ".join(
            f"{m.path}: prefill {shorten(m.prefill_value)}, decode {shorten(m.decode_value)}"
            for m in fatal[:limit]
        )
        more = f"; and {len(fatal) - limit} more" if len(fatal) > limit else ""
        return f"{self.count()}: {shown}{more}"

    def count(self) -> str:
        """``2 fatal differences (and 7 that follow)``."""
        causes = sum(not m.cause for m in self.fatal)
        effects = len(self.fatal) - causes
        count = "1 fatal difference" if causes == 1 else f"{causes} fatal differences"
        return count + (f" (and {effects} that follow)" if effects else "")

    def error(self) -> LayoutRefused:
        remedy = next((m.remedy for m in self.fatal if m.remedy), "")
        return LayoutRefused(self.summary(), stage="handshake", remedy=remedy)


def shorten(text: str, width: int = 48) -> str:
    """The start of ``text``, at most ``width`` characters."""
    return text if len(text) <= width else text[: width - 3] + "..."
