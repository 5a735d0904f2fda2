"""The drafter that belongs to a draft model."""

from __future__ import annotations

from sluice.config import SpecConfig
from sluice.models.base import DraftModel, ModelInfo
from sluice.models.dspark.model import DSparkDraft
from sluice.pools.base import StateMemory
from sluice.spec.draft import Drafter
from sluice.spec.dspark import DSparkDrafter
from sluice.spec.mtp import MtpDrafter


def build_drafter(draft: DraftModel | DSparkDraft, memory: StateMemory, steps: int) -> Drafter:
    """Raises ``ConfigError`` where the draft can't propose ``steps`` tokens a step."""
    if isinstance(draft, DSparkDraft):
        return DSparkDrafter(draft, memory, steps)
    return MtpDrafter(draft, memory)


def own_steps(draft: DraftModel | DSparkDraft | None) -> int:
    """How many tokens a step a draft proposes when nobody says otherwise; 0 without a draft."""
    if isinstance(draft, DSparkDraft):
        return draft.config.block_size  # it was trained for exactly this many
    return 0 if draft is None else SpecConfig().steps


def draft_digest(draft: DraftModel | DSparkDraft, target: ModelInfo) -> str:
    """What tells two pods' drafts apart: a NextN layer comes with its target, a DSPARK draft has a
    checkpoint of its own.
    """
    return draft.digest if isinstance(draft, DSparkDraft) else target.draft_digest
