"""Digests of parts of a component, so that pods of different widths can compare what they hold.

A whole component has one digest. One that is split over ranks has a digest a piece: a stretch of every row's
bytes (a part), of the rows that are dealt to one rank (a deal). Whoever holds a piece can compute it, and the
pieces together make the component's digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from sluice.errors import DigestMismatch
from sluice.layout.component import Component
from sluice.layout.reshard import Deal, Grain, dealt, held_parts, local_runs
from sluice.layout.span import Run, count_rows
from sluice.transfer.digest import DIGEST_BYTES, Buffers, digest_rows

Piece = tuple[int, int]  # deal, part


def digest_pieces(
    memory: Buffers,
    component: Component,
    grain: Grain,
    runs: Sequence[Run],
    first_ordinal: int,
    ranks: int,
    rank: int,
) -> dict[Piece, bytes]:
    """Digests of the pieces that rank ``rank`` of ``ranks`` holds of the rows ``runs``, in logical order."""
    if grain.is_whole:
        return {(0, 0): digest_rows(memory, component, runs)}
    own = component.interleave
    deals = range(rank % own, grain.deals, own)
    parts = held_parts(component, ranks, rank, grain)
    return {
        (deal, part): _digest(memory, component, grain, rows, index)
        for deal in deals
        for rows in [local_runs(dealt(runs, first_ordinal, Deal(deal, grain.deals)), component)]
        for index, part in enumerate(parts)
    }


def join_pieces(grain: Grain, held: Iterable[Mapping[Piece, bytes]]) -> bytes:
    """A component's digest from what all ranks hold of it.

    Raises ``DigestMismatch`` when two ranks hold different bytes of one piece, or nobody has one.
    """
    found: dict[Piece, bytes] = {}
    for rank, pieces in enumerate(held):
        for piece, digest in pieces.items():
            if found.setdefault(piece, digest) != digest:
                raise DigestMismatch(
                    f"{grain.component}: rank {rank} holds other bytes of deal {piece[0]}, part {piece[1]} "
                    "than a rank before it",
                    stage="transfer",
                    remedy="the ranks of one pod have drifted apart; restart it",
                )
    wanted = [(deal, part) for deal in range(grain.deals) for part in range(grain.parts)]
    if missing := [piece for piece in wanted if piece not in found]:
        raise DigestMismatch(f"{grain.component}: no rank holds pieces {missing}", stage="transfer")
    if grain.is_whole:
        return found[0, 0]
    whole = hashlib.sha256(f"{grain.component}:{grain.deals}x{grain.parts}".encode())
    for piece in wanted:
        whole.update(found[piece])
    return whole.digest()[:DIGEST_BYTES]


def _digest(
    memory: Buffers, component: Component, grain: Grain, runs: Sequence[Run], index: int
) -> bytes:
    digest = hashlib.sha256(f"{component.name}:{count_rows(runs)}".encode())
    stretch = slice(index * grain.part_bytes, (index + 1) * grain.part_bytes)
    for entry in component.entries:
        digest.update(f"|{entry.layer_id}:{grain.part_bytes}|".encode())
        if runs:
            buffer = memory.buffer(component.name, entry.layer_id)
            rows = torch.cat(
                [torch.arange(r.first, r.first + r.count, device=buffer.device) for r in runs]
            )
            as_bytes = buffer.view(len(buffer), -1).view(torch.uint8)
            part = as_bytes[rows, stretch].cpu().contiguous()
            digest.update(part.numpy().data)
    return digest.digest()[:DIGEST_BYTES]
