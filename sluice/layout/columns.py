"""Text in aligned columns, for the layout's reports."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def columns(
    rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset(), indent: str = "  "
) -> list[str]:
    """Lines with each column as wide as its widest cell; columns in ``right`` are right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        (
            indent
            + "  ".join(
                cell.rjust(width) if i in right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        ).rstrip()
        for row in rows
    ]


def size(num_bytes: float) -> str:
    """``640 B``, ``5.25 KiB``, ``13.1 MiB``: three significant digits."""
    if num_bytes < 1000:
        return f"{num_bytes:.3g} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        num_bytes /= 1024
        if num_bytes < 1000 or unit == "TiB":
            break
    return f"{num_bytes:.3g} {unit}"


def layers(ids: Sequence[int]) -> str:
    """``0-42``, ``2-42 step 2``, ``0 3 4``, ``0-2, 4-6, 8``: layer ids as people write them."""
    parts: list[str] = []
    start = 0
    while start < len(ids):
        count = _evenly_spaced(ids[start:])
        parts.append(_range(ids[start : start + count]))
        start += count
    return (" " if len(parts) == len(ids) else ", ").join(parts) or "none"


def _evenly_spaced(ids: Sequence[int]) -> int:
    """How many of the first ids make one ascending range; 1 where that would be fewer than three."""
    steps = [b - a for a, b in pairwise(ids)]
    same = next((i for i, step in enumerate(steps) if step != steps[0]), len(steps))
    return same + 1 if same > 1 and steps[0] > 0 else 1


def _range(ids: Sequence[int]) -> str:
    if len(ids) == 1:
        return str(ids[0])
    step = ids[1] - ids[0]
    return f"{ids[0]}-{ids[-1]}" + (f" step {step}" if step > 1 else "")
