"""Which part of a tensor, or of a count of heads, belongs to a rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.errors import ConfigError
from sluice.parallel.group import Parallel


@dataclass(frozen=True)
class Cut:
    """Part ``index`` of ``count`` equal parts along ``axis``.

    ``blocks``: the axis holds several things end to end (gate above up, query over key over value), and
    the part is that of each, not of the whole: widths that add up to the axis.
    """

    axis: int
    index: int
    count: int
    blocks: tuple[int, ...] = ()

    def ranges(self, length: int) -> tuple[range, ...]:
        """Positions of the part, one range a block. Raises ``ConfigError`` for a block that doesn't divide."""
        blocks, first, out = self.blocks or (length,), 0, []
        assert sum(blocks) == length, f"blocks {blocks} of an axis of {length}"
        for width in blocks:
            part = share("tensor width", width, self.count)
            out.append(range(first + self.index * part, first + (self.index + 1) * part))
            first += width
        return tuple(out)


Cuts = tuple[Cut, ...]
WHOLE: Cuts = ()


def cut(x: Tensor, cuts: Cuts) -> Tensor:
    """The part of ``x`` that ``cuts`` name: a view, or a copy where blocks have to be joined."""
    for one in cuts:
        ranges = one.ranges(x.shape[one.axis])
        parts = [x.narrow(one.axis, part.start, len(part)) for part in ranges]
        x = parts[0] if len(parts) == 1 else torch.cat(parts, dim=one.axis)
    return x


def part_of(parallel: Parallel, axis: int, *, blocks: tuple[int, ...] = ()) -> Cuts:
    """This rank's of as many parts as there are ranks."""
    return (Cut(axis, parallel.rank, parallel.size, blocks),) if parallel.size > 1 else WHOLE


def shared_part_of(parallel: Parallel, axis: int, count: int) -> Cuts:
    """This rank's of ``count`` parts, neighbours holding the same one where there are more ranks."""
    if parallel.size <= count:
        return part_of(parallel, axis)
    index = parallel.rank // share("tensor-parallel ranks", parallel.size, count)
    return (Cut(axis, index, count),)


def share(what: str, count: int, ways: int) -> int:
    """``count / ways``. Raises ``ConfigError`` naming both when it isn't whole."""
    if count % ways:
        raise ConfigError(
            f"{what} {count} can't be shared equally by {ways}",
            stage="load",
            remedy="choose a tensor-parallel width that divides the model's heads, widths and vocabulary",
        )
    return count // ways
