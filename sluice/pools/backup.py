"""A request's state on the host: the live rows of every component, copied out and back.

What is copied is what a transfer would send for a prompt of ``kv_len`` tokens, so a request that
comes back finds what a decode pod finds that adopts it. No pool's type is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.errors import ConfigError, InternalError, PoolError
from sluice.layout.component import Component, Coverage, Kind, Owner
from sluice.layout.span import Run, live_ordinals, span
from sluice.pools.base import RequestTables
from sluice.pools.memory import Memory


@dataclass(frozen=True)
class ComponentBackup:
    """One component's live rows in logical order; per entry (its layer) uint8 ``[rows, row_bytes]``."""

    name: str
    layers: tuple[int, ...]
    rows: tuple[Tensor, ...]


@dataclass(frozen=True)
class EarlierState:
    """A request's newest-token rows (``Coverage.LAST``) as they were after its first ``length``
    tokens: only whoever computed those still knows.
    """

    length: int
    components: tuple[ComponentBackup, ...]


@dataclass(frozen=True)
class StateBackup:
    """One request's state between two steps, independent of the items it lay in: of history the rows
    of tokens ``have .. length``, of all else what is live at ``length``.
    """

    have: int
    length: int  # committed tokens
    draft_valid_from: int
    components: tuple[ComponentBackup, ...]
    num_bytes: int  # as of ``backup_bytes``


def check_backup(memory: Memory) -> None:
    """Call at start-up. Raises ``ConfigError`` naming components that rows alone can't restore."""
    missing = memory.without_backup()
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: the pool keeps state outside its rows, so a request under memory "
            f"pressure could be taken off but never restored",
            stage="start",
            remedy="keep the state in rows (whole_in_rows), or run the model where nothing decodes",
        )


def backup_bytes(memory: Memory, length: int, have: int = 0) -> int:
    """What ``back_up`` would copy on the rank that holds most: one number on all ranks, since schedules
    depend on it. With a dealt history (``Component.interleave``) others may copy a row a component less.
    """
    return sum(
        -(-len(live_ordinals(component, length, have)) // component.interleave)
        * component.bytes_per_row
        for component in memory.components()
    )


def check_settled(memory: Memory, tables: RequestTables) -> None:
    """Raises ``InternalError`` for recurrent state that has not taken in exactly the committed tokens:
    a copy of it would bring the damage back.
    """
    for component in memory.components():
        if component.kind is Kind.STATE_LENGTH:
            buffer = memory.buffer(component.name, component.entries[0].layer_id)
            length = int(buffer[tables.slot, 0])
            if length != tables.kv_len:
                raise InternalError(
                    f"request {tables.request_id} (slot {tables.slot}) has {tables.kv_len} committed "
                    f"tokens, but its recurrent state has taken in {length} ({component.name})",
                    stage="retract",
                )


def back_up(
    memory: Memory,
    tables: RequestTables,
    have: int = 0,
    length: int | None = None,
    earlier: EarlierState | None = None,
) -> StateBackup:
    """Copy out what ``length`` (all committed) tokens left, but for history of the first ``have``.
    Waits for the device's last forward.

    Fewer than all only within the last verify step, whose windows still reach back so far; recurrent
    state doesn't, and is taken from ``earlier``. A draft's newest row is zeroed then.

    Between steps only: rows of an open verify are nobody's state yet. Raises ``SpanMismatch`` for a
    live row that isn't mapped, ``PoolError`` for more tokens than are committed, and for recurrent
    state that ``earlier`` lacks or has of another length.
    """
    if length is None:
        length = tables.kv_len
    if length > tables.kv_len or (earlier is not None and earlier.length != length):
        raise PoolError(
            f"request {tables.request_id}: backup at {length} tokens, {tables.kv_len} are committed"
            + (f", newest rows are of {earlier.length}" if earlier is not None else "")
        )
    known = {one.name: one for one in earlier.components} if earlier is not None else {}
    components: list[ComponentBackup] = []
    for component in memory.components():
        if component.coverage is Coverage.LAST and length < tables.kv_len:
            components.append(known.get(component.name) or _blank(memory, component, tables))
        else:
            runs = _own_runs(memory, component, tables, length, have)
            components.append(_copied(memory, component, runs))
    num_bytes = backup_bytes(memory, length, have)
    return StateBackup(have, length, tables.draft_valid_from, tuple(components), num_bytes)


def restore(memory: Memory, backup: StateBackup, tables: RequestTables) -> None:
    """Copy everything back into other items, mapped for ``backup.length`` positions. History of the
    first ``backup.have`` tokens must be there, as ``tables.kv_len`` says.

    Raises ``PoolError`` when it isn't, or the backup lacks a component or an entry, has one too many,
    or counts other rows; then ``tables`` must be closed. Nothing is ever skipped.
    """
    if backup.have != tables.kv_len:
        raise PoolError(
            f"a backup of tokens {backup.have}..{backup.length} follows {tables.kv_len} tokens"
        )
    kept = {component.name: component for component in backup.components}
    wanted = [component.name for component in memory.components()]
    if sorted(kept) != sorted(wanted):
        raise PoolError(f"the backup has components {sorted(kept)}, the memory {sorted(wanted)}")
    for component in memory.components():
        runs = _own_runs(memory, component, tables, backup.length, backup.have)
        _put_back(memory, component, runs, kept[component.name])
    tables.kv_len = backup.length
    tables.draft_valid_from = backup.draft_valid_from


def newest_row(component: str, layers: Sequence[int], rows: Sequence[Tensor]) -> ComponentBackup:
    """One row a layer, each in its entry's dtype and shape, as a part of ``EarlierState``."""
    return ComponentBackup(
        component,
        tuple(layers),
        tuple(row.contiguous().view(1, -1).view(torch.uint8).cpu() for row in rows),
    )


def _blank(memory: Memory, component: Component, tables: RequestTables) -> ComponentBackup:
    if component.owner is not Owner.DRAFT:
        raise PoolError(
            f"request {tables.request_id}: {component.name} of an earlier token is gone",
            remedy="take it from the verify that computed it",
        )
    rows = [
        torch.zeros(1, _row_bytes(memory, component, entry.layer_id).shape[1], dtype=torch.uint8)
        for entry in component.entries
    ]
    return ComponentBackup(component.name, _layers(component), tuple(rows))


def _own_runs(
    memory: Memory, component: Component, tables: RequestTables, length: int, have: int
) -> tuple[Run, ...]:
    first = live_ordinals(component, length, have).start
    return memory.own_runs(component, span(component, tables, length, have), first)


def _copied(memory: Memory, component: Component, runs: Sequence[Run]) -> ComponentBackup:
    rows = []
    for entry in component.entries:
        held = _row_bytes(memory, component, entry.layer_id)
        rows.append(held[_numbers(runs, held.device)].cpu())
    return ComponentBackup(component.name, _layers(component), tuple(rows))


def _put_back(
    memory: Memory, component: Component, runs: Sequence[Run], kept: ComponentBackup
) -> None:
    if kept.layers != _layers(component):
        raise PoolError(
            f"{component.name}: the backup has layers {kept.layers}, the memory {_layers(component)}"
        )
    for layer_id, saved in zip(kept.layers, kept.rows, strict=True):
        held = _row_bytes(memory, component, layer_id)
        numbers = _numbers(runs, held.device)
        if saved.shape != (len(numbers), held.shape[1]):
            raise PoolError(
                f"{component.name} layer {layer_id}: the backup is {tuple(saved.shape)} bytes, "
                f"the request's rows are {(len(numbers), held.shape[1])}"
            )
        held[numbers] = saved.to(held.device)


def _layers(component: Component) -> tuple[int, ...]:
    return tuple(entry.layer_id for entry in component.entries)


def _row_bytes(memory: Memory, component: Component, layer_id: int) -> Tensor:
    """The entry as uint8 ``[num_rows, row_bytes]``, a view: bytes have no NaN and no rounding."""
    buffer = memory.buffer(component.name, layer_id)
    return buffer.view(len(buffer), -1).view(torch.uint8)


def _numbers(runs: Sequence[Run], device: torch.device) -> Tensor:
    rows = [torch.arange(run.first, run.first + run.count, device=device) for run in runs]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64, device=device)
