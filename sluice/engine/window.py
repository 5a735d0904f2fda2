"""Below which position a prompt's window state is dead, read off the components' coverage rules."""

from __future__ import annotations

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
    """W of the draft's window; 0 without a draft."""
    windows = [
        component.window_tokens
        for component in components
        if component.owner is Owner.DRAFT and component.coverage is Coverage.WINDOW
    ]
    return max(windows, default=0)
