"""Who writes what to whom between pods of several ranks, in words: a part of ``sluice layout diff``."""

from __future__ import annotations

from sluice.layout.columns import columns, size
from sluice.layout.outcome import Agreement, ComponentPlan
from sluice.layout.reshard import Share, reshard


def explain_writers(agreement: Agreement) -> list[str]:
    """One line a pair of ranks and component; empty for pods of one rank each."""
    if agreement.ranks == (1, 1):
        return []
    plans = {plan.name: plan for plan in agreement.plans}
    rows = [
        (
            f"{pairing.source} -> {pairing.target}",
            share.component,
            _what(share, plans[share.component]),
        )
        for pairing in reshard(agreement.plans, *agreement.ranks)
        for share in pairing.shares
    ]
    return ["", "who writes what to whom: prefill rank -> decode rank", "", *columns(rows)]


def _what(share: Share, plan: ComponentPlan) -> str:
    text = "all of it" if share.num_bytes == plan.prefill.entries[0].row_bytes else _part(share)
    if share.num_bytes < plan.decode.entries[0].row_bytes:
        text += f", to byte {share.target_offset}"
    if share.deal.count > 1:
        text += f"; rows {share.deal.index}, {share.deal.index + share.deal.count}, ... only"
    return text


def _part(share: Share) -> str:
    return f"{size(share.num_bytes)} from byte {share.source_offset}"
