"""Which differences only follow from another one, so that a reader sees one cause and not its twenty effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sluice.layout.component import Space
from sluice.layout.outcome import FOLLOWS_FROM, Mismatch, Severity

_WINDOW_SPACES = {Space.WINDOW_PAGE.value, Space.RING_ROW.value, Space.STATE_ROW.value}


def follow(mismatch: Mismatch, cause: str) -> Mismatch:
    """``mismatch`` marked as an effect of the difference at path ``cause``: nothing to fix by itself."""
    return replace(mismatch, explanation=FOLLOWS_FROM + cause, remedy="")


def attribute(found: Sequence[Mismatch]) -> tuple[Mismatch, ...]:
    """Mark component differences that a difference in geometry explains, values included."""
    by_path = {mismatch.path: mismatch for mismatch in found}
    return tuple(
        follow(mismatch, cause) if (cause := _cause(mismatch, by_path)) else mismatch
        for mismatch in found
    )


def _cause(mismatch: Mismatch, by_path: Mapping[str, Mismatch]) -> str:
    """Empty unless the cause is there and its values lead to exactly these values."""
    if mismatch.path == _BYTES:
        return _FORMAT if _FORMAT in by_path and _added(mismatch) else ""
    stem, _, field = mismatch.path.rpartition(".")
    if not stem.startswith("components[") or mismatch.severity is not Severity.FATAL:
        return ""
    path = _GEOMETRY_OF.get(field, "")
    cause = by_path.get(path)
    if cause is None:
        return ""
    match field:
        case "dtype":
            # A format with bytes of its own picks its number types by itself.
            own = _BYTES in by_path and _added(by_path[_BYTES])
            explained = own or _values(mismatch) == _values(cause)
        case "window_tokens":
            explained = _values(mismatch) == _values(cause)
        case "row_bytes":
            dtype = by_path.get(f"{stem}.dtype")
            explained = dtype is not None and _cause(dtype, by_path) == path
        case "rows_per_item":
            explained = _in_proportion(mismatch, cause)
        case _:
            explained = set(_values(mismatch)) <= _WINDOW_SPACES
    return path if explained else ""


_FORMAT, _BYTES = "geometry.kv_dtype", "geometry.byte_layout"
_GEOMETRY_OF = {
    "dtype": _FORMAT,
    "row_bytes": _FORMAT,
    "window_tokens": "geometry.window_tokens",
    "rows_per_item": "geometry.page_tokens",
    "space": "geometry.pool_mode",
}


def _values(mismatch: Mismatch) -> tuple[str, str]:
    return mismatch.prefill_value, mismatch.decode_value


def _added(byte_layouts: Mismatch) -> bool:
    """Whether one byte layout is the other with something beside it, like ``rows`` and ``rows+scales``."""
    ours, theirs = (value.split("+")[0] for value in _values(byte_layouts))
    return ours == theirs


def _in_proportion(mismatch: Mismatch, cause: Mismatch) -> bool:
    values = (*_values(mismatch), *_values(cause))
    if not all(value.isdecimal() for value in values):
        return False  # a broken rule in words, not a number of rows
    ours, theirs, page, other = map(int, values)
    return ours * other == theirs * page
