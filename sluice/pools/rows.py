"""Vectorised row arithmetic: the torch twin of ``layout.span.physical_row``."""

from __future__ import annotations

import torch
from torch import Tensor

from sluice.layout.component import Component, Space
from sluice.pools.base import BatchTables


def physical_rows(
    component: Component, tables: BatchTables, segments: Tensor, ordinals: Tensor
) -> Tensor:
    """Physical row of each (segment, logical row) pair.

    ``segments`` and ``ordinals`` are int64 of one broadcastable shape; ordinals must be >= 0 and
    mapped (unmapped pages resolve to the padding page 0).
    """
    per_item = component.rows_per_item
    match component.space:
        case Space.PAGE:
            page = ordinals * component.tokens_per_row // tables.page_tokens
            return tables.pages_SP[segments, page] * per_item + ordinals % per_item
        case Space.WINDOW_PAGE:
            page = ordinals * component.tokens_per_row // tables.page_tokens
            return tables.window_pages_SP[segments, page] * per_item + ordinals % per_item
        case Space.RING_ROW | Space.STATE_ROW:
            return tables.slots_S[segments] * per_item + ordinals % per_item
        case Space.REQUEST_SLOT:
            return tables.slots_S[segments] + torch.zeros_like(ordinals)
