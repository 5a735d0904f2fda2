"""Below which position a prompt's window state is dead, read off the components' coverage rules."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sluice.layout.component import Component, Coverage, Owner, Space
from sluice.layout.span import live_ordinals


def window_floor(components: Sequence[Component], length: int) -> int:
    """First position that any window page must hold when ``length`` tokens are committed."""
    floors = [
        live_ordinals(component, length).start * component.tokens_per_row
        for component in components
        if component.space is Space.WINDOW_PAGE
    ]
    return min(floors, default=0)


def draft_window_tokens(components: Sequence[Component]) -> int:
    """How many of a prompt's last rows the draft sees: W of its window, every row there can be where
    it keeps a history, one where it keeps the newest token's row only; 0 without a draft.
    """
    drafts = [component for component in components if component.owner is Owner.DRAFT]
    if any(component.coverage is Coverage.HISTORY for component in drafts):
        return sys.maxsize
    windows = [c.window_tokens for c in drafts if c.coverage is Coverage.WINDOW]
    return max((*windows, *(1 for c in drafts if c.coverage is Coverage.LAST)), default=0)
