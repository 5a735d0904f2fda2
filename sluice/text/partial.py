"""Text that may yet become a marker, when text comes piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


def held_chars(buffer: str, markers: Sequence[str]) -> int:
    """Length of the longest end of ``buffer`` that begins one of ``markers`` without completing it."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for length in range(min(longest, len(buffer)), 0, -1):
        if any(marker.startswith(buffer[-length:]) for marker in markers):
            return length
    return 0


def first_marker(buffer: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first complete marker is, and which; the longest of those that begin there."""
    found = [(at, -len(marker), marker) for marker in markers if (at := buffer.find(marker)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker
