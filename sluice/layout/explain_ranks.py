"""Who writes what to whom between pods of several ranks, in words: a part of ``sluice layout diff``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sluice.layout.columns import columns, size
from sluice.layout.component import Coverage
from sluice.layout.outcome import Agreement, ComponentPlan
from sluice.layout.reshard import Deal, Pairing, Share, Way, reshard

_HEADER = ("ranks", "component", "rows", "of each row", "moves", "leaves")
_LEAVES = {
    Way.RUNS: "in runs",
    Way.GATHERED: "gathered",
    Way.PIECES: "row by row",
}
_ONE_ROW = "a write a layer"
_MEANING = {
    Way.RUNS: "in runs     rows that are neighbours on both pods are one write",
    Way.GATHERED: "gathered    apart at the writer, end to end at the reader: copied into staging, then one write",
    Way.PIECES: "row by row  apart at the reader too, or large: a write for each row and layer",
}


def explain_writers(agreement: Agreement) -> list[str]:
    """A table of every pair of ranks that exchange anything; empty for pods of one rank each."""
    if agreement.ranks == (1, 1):
        return []
    plans = {plan.name: plan for plan in agreement.plans}
    pairings = reshard(agreement.plans, *agreement.ranks)
    shares = [share for pairing in pairings for share in pairing.shares]
    ways = {
        share.way(plans[share.component].prefill, plans[share.component].decode) for share in shares
    }
    return [
        "",
        "who writes what to whom, prefill rank -> decode rank",
        "",
        *columns([_HEADER, *_lines(pairings, plans)]),
        "",
        *(f"  {_MEANING[way]}" for way in Way if way in ways),
    ]


def _lines(
    pairings: Sequence[Pairing], plans: Mapping[str, ComponentPlan]
) -> Iterator[tuple[str, ...]]:
    for pairing in pairings:
        ranks = f"{pairing.source} -> {pairing.target}"
        for share in pairing.shares:
            plan = plans[share.component]
            leaves = (
                _ONE_ROW if _is_one_row(plan) else _LEAVES[share.way(plan.prefill, plan.decode)]
            )
            what = _rows(plan, share.deal), _part(share, plan), _moves(share, plan)
            yield (ranks, plan.name, *what, leaves)
            ranks = ""


def _is_one_row(plan: ComponentPlan) -> bool:
    return plan.prefill.coverage is Coverage.LAST


def _rows(plan: ComponentPlan, deal: Deal) -> str:
    if _is_one_row(plan):
        return "the newest"
    if deal.count == 1:
        return "all"
    return ", ".join(str(deal.index + deal.count * i) for i in range(3)) + ", ..."


def _part(share: Share, plan: ComponentPlan) -> str:
    """Which of the writer's bytes, and where they go if the reader has more than those."""
    ours, theirs = (side.entries[0].row_bytes for side in (plan.prefill, plan.decode))
    text = f"all {size(ours)}"
    if share.num_bytes < ours:
        text = f"bytes {share.source_offset}..{share.source_offset + share.num_bytes} of {ours}"
    if share.num_bytes < theirs:
        text += f", to byte {share.target_offset} of {theirs}"
    return text


def _moves(share: Share, plan: ComponentPlan) -> str:
    """Over all layers: of a history per token of the prompt, of anything else per row."""
    component = plan.prefill
    num_bytes = share.num_bytes * len(component.entries)
    if component.coverage is Coverage.HISTORY:
        return f"{size(num_bytes / component.tokens_per_row / share.deal.count)} a token"
    return f"{size(num_bytes)} a row"
