"""From two run lists to what carries one component, and from that to groups of bounded size. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from sluice.errors import SpanMismatch, TransferFailed
from sluice.layout.component import Component
from sluice.layout.reshard import Share, Way, dealt, local_runs
from sluice.layout.span import Run, pair_runs
from sluice.pools.base import Region
from sluice.transfer.plane import Movement, Pack, Write

# 1-8 MB groups cost nothing and bound head-of-line blocking (docs/performance.md).
GROUP_BYTES = 4 << 20
GROUP_WRITES = 4096  # tiny rows: a descriptor costs about as much as 16 KB


def plan_writes(
    component: Component,
    target_component: Component,
    source_runs: Sequence[Run],
    target_runs: Sequence[Run],
    source_regions: Iterable[Region],
    target_regions: Iterable[Region],
    *,
    share: Share | None = None,
    first_ordinal: int = 0,
) -> tuple[Movement, ...]:
    """All of one component: every pair of runs in every entry, entries matched by layer id. Small pieces that
    lie end to end at the destination but apart at the source become packs.

    ``component`` is the source's, ``target_component`` the peer's of the same name; they may differ in capacity and
    ring stride. Regions of other components are ignored, so that ``memory.regions()`` and an endpoint's regions can
    be passed whole. ``share`` names a part of every row, or some of the rows; the first row's ordinal is
    ``first_ordinal``. Raises ``SpanMismatch`` when the two sides don't describe the same rows
    or row sizes, ``TransferFailed`` when a run leaves its region or touches the padding item.
    """
    if target_component.name != component.name:
        raise SpanMismatch(
            f"{component.name} paired with {target_component.name}", stage="transfer"
        )
    sources = _by_layer(component, source_regions, "source")
    targets = _by_layer(component, target_regions, "destination")
    way = Way.RUNS if share is None else share.way(component, target_component)
    share = None if way is Way.RUNS else share
    _check_same_entries(
        component, component if share is None else target_component, sources, targets
    )
    _check_runs(component, source_runs, sources, "source")
    if share is not None:
        source_runs = dealt(source_runs, first_ordinal, share.deal)
        target_runs = local_runs(dealt(target_runs, first_ordinal, share.deal), target_component)
    _check_runs(target_component, target_runs, targets, "destination")
    _check_disjoint(component, target_runs)
    pairs = pair_runs(source_runs, target_runs)
    if share is not None:
        if way is Way.GATHERED:
            return tuple(_packed(component, share, sources, targets, pairs))
        return tuple(_parts(component, target_component, share, sources, targets, pairs))
    return tuple(
        Write(
            source=sources[entry.layer_id].address + source_row * entry.row_bytes,
            destination=targets[entry.layer_id].address + target_row * entry.row_bytes,
            num_bytes=count * entry.row_bytes,
        )
        for entry in component.entries
        for source_row, target_row, count in pairs
    )


def row_bytes(component: Component) -> int:
    """Of a component whose entries all have rows of one size; what is resharded has."""
    return component.entries[0].row_bytes


def _parts(
    component: Component,
    target: Component,
    share: Share,
    sources: Mapping[int, Region],
    targets: Mapping[int, Region],
    pairs: Sequence[tuple[int, int, int]],
) -> Iterator[Write]:
    """One write a row: neighbouring rows' stretches don't touch, or aren't worth a gather."""
    ours, theirs = row_bytes(component), row_bytes(target)
    for entry in component.entries:
        source = sources[entry.layer_id].address + share.source_offset
        destination = targets[entry.layer_id].address + share.target_offset
        for source_row, target_row, count in pairs:
            for step in range(count):
                yield Write(
                    source + (source_row + step) * ours,
                    destination + (target_row + step) * theirs,
                    share.num_bytes,
                )


def _packed(
    component: Component,
    share: Share,
    sources: Mapping[int, Region],
    targets: Mapping[int, Region],
    pairs: Sequence[tuple[int, int, int]],
) -> Iterator[Movement]:
    """Whole rows of the destination: one write or pack for each stretch of neighbours there."""
    ours = row_bytes(component)
    stretches = _stretches(pairs)
    for entry in component.entries:
        base = sources[entry.layer_id].address + share.source_offset
        for target_row, rows in stretches:
            destination = targets[entry.layer_id].address + target_row * share.num_bytes
            if len(rows) == 1 or (share.num_bytes == ours and _is_one_run(rows)):
                yield Write(base + rows[0] * ours, destination, len(rows) * share.num_bytes)
            else:
                yield Pack(base, ours, rows, share.num_bytes, destination)


def _stretches(pairs: Sequence[tuple[int, int, int]]) -> list[tuple[int, tuple[int, ...]]]:
    """Stretches of neighbouring destination rows: the first one, and the source row of each."""
    found: list[tuple[int, list[int]]] = []
    for source_row, target_row, count in pairs:
        if not found or found[-1][0] + len(found[-1][1]) != target_row:
            found.append((target_row, []))
        found[-1][1].extend(range(source_row, source_row + count))
    return [(first, tuple(rows)) for first, rows in found]


def _is_one_run(rows: Sequence[int]) -> bool:
    return all(after == before + 1 for before, after in pairwise(rows))


def group_writes(
    moves: Iterable[Movement], max_bytes: int = GROUP_BYTES, max_writes: int = GROUP_WRITES
) -> tuple[tuple[Movement, ...], ...]:
    """Cut into groups of at most ``max_bytes`` and ``max_writes``, in order; what is larger is split.

    Each piece of a pack counts as a write: where there is no room to gather them, they are.
    """
    if max_bytes <= 0 or max_writes <= 0:
        raise ValueError(f"group limits must be positive, got {max_bytes} bytes, {max_writes}")
    groups: list[tuple[Movement, ...]] = []
    group: list[Movement] = []
    room, places = max_bytes, max_writes
    for move in _split(moves, max_bytes, max_writes):
        if group and (move.num_bytes > room or num_pieces(move) > places):
            groups.append(tuple(group))
            group, room, places = [], max_bytes, max_writes
        group.append(move)
        room, places = room - move.num_bytes, places - num_pieces(move)
    if group:
        groups.append(tuple(group))
    return tuple(groups)


def count_bytes(moves: Iterable[Movement]) -> int:
    return sum(move.num_bytes for move in moves)


def num_pieces(move: Movement) -> int:
    return len(move.rows) if isinstance(move, Pack) else 1


def _split(moves: Iterable[Movement], max_bytes: int, max_writes: int) -> Iterator[Movement]:
    for move in moves:
        if move.num_bytes <= max_bytes and num_pieces(move) <= max_writes:
            yield move
        elif isinstance(move, Write):
            for offset in range(0, move.num_bytes, max_bytes):
                size = min(max_bytes, move.num_bytes - offset)
                yield Write(move.source + offset, move.destination + offset, size)
        elif (most := min(max_bytes // move.piece_bytes, max_writes)) == 0:
            yield from _split(move.writes(), max_bytes, max_writes)
        else:
            for start in range(0, len(move.rows), most):
                yield move.part(start, min(start + most, len(move.rows)))


def _by_layer(component: Component, regions: Iterable[Region], side: str) -> dict[int, Region]:
    found: dict[int, Region] = {}
    for region in regions:
        if region.component != component.name:
            continue
        if region.layer_id in found:
            raise TransferFailed(
                f"{component.name}: the {side} declares layer {region.layer_id} twice",
                stage="transfer",
            )
        found[region.layer_id] = region
    return found


def _check_same_entries(
    component: Component,
    target: Component,
    sources: Mapping[int, Region],
    targets: Mapping[int, Region],
) -> None:
    layers = {entry.layer_id for entry in component.entries}
    if not layers == set(sources) == set(targets):
        raise SpanMismatch(
            f"{component.name}: layers {sorted(layers)} declared, source has {sorted(sources)}, "
            f"destination {sorted(targets)}",
            stage="transfer",
            remedy="both pods must serve the same model with the same draft",
        )
    declared = {entry.layer_id: entry.row_bytes for entry in target.entries}
    for entry in component.entries:
        sizes = sources[entry.layer_id].row_bytes, targets[entry.layer_id].row_bytes
        if sizes != (entry.row_bytes, declared.get(entry.layer_id, entry.row_bytes)):
            raise SpanMismatch(
                f"{component.name} layer {entry.layer_id}: a row is {entry.row_bytes} bytes by "
                f"declaration, {sizes[0]} at the source, {sizes[1]} at the destination",
                stage="transfer",
                remedy="both pods must use the same KV dtype and row shape",
            )


def _check_runs(
    component: Component,
    runs: Sequence[Run],
    regions: Mapping[int, Region],
    side: str,
) -> None:
    """Item 0 is padding on every pod, and so are all its rows."""
    padding_rows = component.rows_per_item // component.interleave
    num_rows = min((region.num_rows for region in regions.values()), default=0)
    for run in runs:
        if run.count <= 0 or run.first < padding_rows or run.count > num_rows - run.first:
            raise TransferFailed(
                f"{component.name}: {side} rows {run.first}..{run.first + run.count} are not inside "
                f"{padding_rows}..{num_rows} (rows below {padding_rows} are padding)",
                stage="transfer",
                remedy="runs must come from layout.span over mapped items",
            )


def _check_disjoint(component: Component, runs: Sequence[Run]) -> None:
    """Two logical rows in one destination row would overwrite each other, and no count would show it."""
    ordered = sorted(runs, key=lambda run: run.first)
    for before, after in pairwise(ordered):
        if before.first + before.count > after.first:
            raise TransferFailed(
                f"{component.name}: destination row {after.first} appears twice in the grant",
                stage="transfer",
            )
