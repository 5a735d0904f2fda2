"""The gate: two layouts in, an agreement or a refusal out. Pure: both pods run it and compare."""

from __future__ import annotations

import hashlib
import json

from sluice.layout.causes import attribute
from sluice.layout.compare import compare, drafts
from sluice.layout.component import Owner
from sluice.layout.consistency import broken_rules
from sluice.layout.encoding import fingerprint
from sluice.layout.layout import WIRE_VERSION, Layout
from sluice.layout.outcome import (
    Agreement,
    ComponentPlan,
    DraftHandover,
    Mismatch,
    Refusal,
    Severity,
)

__all__ = [
    "Agreement",
    "ComponentPlan",
    "DraftHandover",
    "Mismatch",
    "Refusal",
    "Severity",
    "negotiate",
]


def negotiate(
    prefill: Layout, decode: Layout, *, allow_missing_draft: bool = False
) -> Agreement | Refusal:
    """Whether state of ``prefill`` can be handed to ``decode``, and what exactly will be sent.

    A refusal lists every difference, not only the first. ``allow_missing_draft`` accepts a draft on
    one pod only: then no draft component is sent, and ``Agreement.draft`` says what decode must do
    about it.
    """
    differences = tuple(compare(prefill, decode, allow_missing_draft=allow_missing_draft))
    broken = tuple(broken_rules(prefill, decode))
    found = (*_without_notes_on(broken, attribute(differences)), *broken)
    if any(mismatch.severity is Severity.FATAL for mismatch in found):
        return Refusal(found)
    draft = _handover(prefill, decode)
    plans = tuple(
        ComponentPlan(component.name, component, decode.component(component.name))
        for component in prefill.components
        if component.owner is Owner.TARGET or draft is DraftHandover.SENT
    )
    return Agreement(
        digest=_digest(prefill, decode, plans, draft),
        plans=plans,
        draft=draft,
        notes=found,
        ranks=(prefill.parallelism.tensor, decode.parallelism.tensor),
    )


def _without_notes_on(
    broken: tuple[Mismatch, ...], differences: tuple[Mismatch, ...]
) -> tuple[Mismatch, ...]:
    """A stride that breaks a rule must not be called convertible in the same breath."""
    paths = {mismatch.path for mismatch in broken}
    return tuple(m for m in differences if m.severity is Severity.FATAL or m.path not in paths)


def _handover(prefill: Layout, decode: Layout) -> DraftHandover:
    match drafts(prefill), drafts(decode):
        case True, True:
            return DraftHandover.SENT
        case False, True:
            return DraftHandover.WITHHELD
        case True, False:
            return DraftHandover.UNUSED
        case _:
            return DraftHandover.NONE


def _digest(
    prefill: Layout, decode: Layout, plans: tuple[ComponentPlan, ...], draft: DraftHandover
) -> str:
    """sha256 of what was agreed. Capacities are left out: a pod may be resized without a new
    agreement.
    """
    agreed = json.dumps(
        {
            "wire_version": WIRE_VERSION,
            "prefill": fingerprint(prefill),
            "decode": fingerprint(decode),
            "components": [plan.name for plan in plans],
            "draft": draft.value,
        },
        sort_keys=True,
        separators=(",", ":"),
    )
    return hashlib.sha256(agreed.encode()).hexdigest()
