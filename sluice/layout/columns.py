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
    """``0-42``, ``2-42 step 2``, ``0 3 4``: layer ids as people write them."""
    if len(ids) > 2:
        steps = {b - a for a, b in pairwise(ids)}
        if len(steps) == 1 and (step := steps.pop()) > 0:
            return f"{ids[0]}-{ids[-1]}" + (f" step {step}" if step > 1 else "")
    return " ".join(map(str, ids)) or "none"
