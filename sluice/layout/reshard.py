"""Who writes which bytes to whom when two pods split their state over ranks differently. Pure.

A component is split along the first axis of its rows (heads), so that a rank's share of a row is one
stretch of bytes, or it is whole on every rank; and its history may be dealt to context-parallel ranks
token by token. Every byte that a decode rank holds gets exactly one writer: where several prefill ranks
hold the same bytes, one is elected, spread evenly over the decode ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import lcm

from sluice.errors import GeometryError
from sluice.layout.component import Component
from sluice.layout.outcome import ComponentPlan
from sluice.layout.span import Run


@dataclass(frozen=True)
class Deal:
    """Every ``count``-th logical row, from ordinal ``index`` on."""

    index: int = 0
    count: int = 1


EVERY_ROW = Deal()
# Larger pieces cost less as writes of their own (docs/performance.md).
GATHER_BELOW_BYTES = 16 << 10


class Way(Enum):
    """How a share leaves the writer's rows."""

    RUNS = "runs"  # neighbouring rows are neighbouring bytes on both sides
    GATHERED = "gathered"  # apart at the writer, end to end at the reader: through staging memory
    PIECES = "pieces"  # apart at the reader, or large: a write for each row


@dataclass(frozen=True)
class Share:
    """What of each row of a component goes from one rank's entries to another's: ``num_bytes`` from byte
    ``source_offset`` of the source's row to ``target_offset`` of the target's, for the rows of ``deal``.
    """

    component: str
    source_offset: int
    target_offset: int
    num_bytes: int
    deal: Deal = EVERY_ROW

    def way(self, source: Component, target: Component) -> Way:
        """``source`` and ``target`` are the component's on both sides."""
        sizes = {entry.row_bytes for side in (source, target) for entry in side.entries}
        if sizes == {self.num_bytes} and self.deal.count == 1:
            return Way.RUNS
        whole_there = self.num_bytes == target.entries[0].row_bytes
        return Way.GATHERED if whole_there and self.num_bytes < GATHER_BELOW_BYTES else Way.PIECES


@dataclass(frozen=True)
class Pairing:
    """What one prefill rank writes to one decode rank."""

    source: int
    target: int
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class Grain:
    """The finest pieces that both pods cut a component's rows into: ``parts`` stretches of ``part_bytes`` of
    a whole row, rows dealt in turn to ``deals``. Digests are of such pieces, so that both can compute them.
    """

    component: str
    parts: int
    part_bytes: int
    deals: int

    @property
    def is_whole(self) -> bool:
        return self.parts == 1 and self.deals == 1


def reshard(plans: Sequence[ComponentPlan], prefill: int, decode: int) -> tuple[Pairing, ...]:
    """The pairings of ``prefill`` and ``decode`` ranks that exchange anything, by target, then source.

    Raises ``GeometryError`` for widths or shares that don't divide (the gate refuses them first).
    """
    shares: dict[tuple[int, int], list[Share]] = {}
    for target in range(decode):
        for plan in plans:
            for source, share in _shares(plan, prefill, decode, target):
                shares.setdefault((target, source), []).append(share)
    return tuple(
        Pairing(source, target, tuple(shares[target, source])) for target, source in sorted(shares)
    )


def grain_of(plan: ComponentPlan) -> Grain:
    source, target = plan.prefill, plan.decode
    parts = lcm(shards_of(source), shards_of(target))
    return Grain(
        plan.name,
        parts,
        whole_row_bytes(source) // parts,
        lcm(source.interleave, target.interleave),
    )


def part_index(shards: int, ranks: int, rank: int) -> int:
    """Which of ``shards`` distinct parts a rank holds; neighbours share one where there are more ranks."""
    return rank * shards // ranks


def shards_of(component: Component) -> int:
    return component.entries[0].shards


def whole_row_bytes(component: Component) -> int:
    """Bytes of a row before it is split."""
    return component.entries[0].row_bytes * shards_of(component)


def held_parts(component: Component, ranks: int, rank: int, grain: Grain) -> range:
    """Which of a grain's parts a rank holds, in the order of its rows' bytes."""
    each = grain.parts // shards_of(component)
    first = part_index(shards_of(component), ranks, rank) * each
    return range(first, first + each)


def dealt(runs: Sequence[Run], first_ordinal: int, deal: Deal) -> tuple[Run, ...]:
    """The rows of a run list whose ordinals belong to ``deal``, as rows of their own; the list's first
    row is ``first_ordinal``.
    """
    if deal.count == 1:
        return tuple(runs)
    out: list[Run] = []
    ordinal = first_ordinal
    for run in runs:
        first = run.first + (deal.index - ordinal) % deal.count
        out += [Run(row, 1) for row in range(first, run.first + run.count, deal.count)]
        ordinal += run.count
    return tuple(out)


def local_runs(runs: Sequence[Run], component: Component) -> tuple[Run, ...]:
    """Where rows lie on the rank that owns them, neighbours joined: its buffers hold every n-th row of the
    numbering that all ranks of a dealt component share.
    """
    if component.interleave == 1:
        return tuple(runs)
    out: list[Run] = []
    for run in runs:
        assert run.count == 1, "dealt rows come one by one"
        row = run.first // component.interleave
        if out and out[-1].first + out[-1].count == row:
            out[-1] = Run(out[-1].first, out[-1].count + 1)
        else:
            out.append(Run(row, 1))
    return tuple(out)


def _shares(
    plan: ComponentPlan, prefill: int, decode: int, target: int
) -> Iterator[tuple[int, Share]]:
    """Everything that ``target`` must receive of one component, each share with its writer."""
    source = plan.prefill
    _check(plan)
    own = _stretch(plan.decode, decode, target)
    deal = Deal(target % plan.decode.interleave, plan.decode.interleave)
    for part in range(shards_of(source)):
        size = source.entries[0].row_bytes
        begin, end = max(own.start, part * size), min(own.stop, (part + 1) * size)
        if begin < end:
            holders = [
                rank
                for rank in range(prefill)
                if part_index(shards_of(source), prefill, rank) == part
            ]
            writer = holders[target * len(holders) // decode]
            yield (
                writer,
                Share(plan.name, begin - part * size, begin - own.start, end - begin, deal),
            )


def _stretch(component: Component, ranks: int, rank: int) -> range:
    """Which bytes of a whole row a rank holds."""
    size = component.entries[0].row_bytes
    first = part_index(shards_of(component), ranks, rank) * size
    return range(first, first + size)


def _check(plan: ComponentPlan) -> None:
    for component in (plan.prefill, plan.decode):
        kinds = {(entry.row_bytes, entry.shards, entry.shard_axis) for entry in component.entries}
        if len(kinds) != 1 or (shards_of(component) > 1 and component.entries[0].shard_axis != 0):
            raise GeometryError(
                f"{plan.name}: layers are split in {len(kinds)} ways; only rows that all split along "
                "their first axis can be moved between widths",
                stage="reshard",
            )
    if (
        whole_row_bytes(plan.prefill) != whole_row_bytes(plan.decode)
        or plan.prefill.interleave != 1
    ):
        raise GeometryError(
            f"{plan.name}: whole rows of {whole_row_bytes(plan.prefill)} and "
            f"{whole_row_bytes(plan.decode)} bytes, prefill's dealt to {plan.prefill.interleave} ranks",
            stage="reshard",
        )
