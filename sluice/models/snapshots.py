"""At which depths recurrent state may be kept for reuse: a state exists after every token, but only
once.

Pages of history can be shared up to any length; a recurrent state only at the depth where somebody
copied it. Depths lie on a grid that pages lie on too, since a prefix is reusable only where both are.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice.errors import ConfigError


@dataclass(frozen=True)
class Crossing:
    """A grid depth that committed tokens reach: ``depth`` tokens are ``tokens`` beyond the old length."""

    depth: int
    tokens: int


@dataclass(frozen=True)
class SnapshotGrid:
    """Depths are multiples of ``interval_tokens``. Raises ``ConfigError`` where a step could cross two
    of them, or where one would lie inside a page.
    """

    interval_tokens: int
    page_tokens: int
    verify_tokens: int

    def __post_init__(self) -> None:
        if self.interval_tokens < max(1, self.verify_tokens):
            raise ConfigError(
                f"snapshot interval of {self.interval_tokens} tokens: a step commits up to "
                f"{self.verify_tokens}, so it could cross two depths and keep one",
                stage="start",
                remedy=f"choose an interval of at least {self.verify_tokens} tokens",
            )
        if self.interval_tokens % self.page_tokens:
            raise ConfigError(
                f"snapshot interval of {self.interval_tokens} tokens isn't a multiple of a page "
                f"({self.page_tokens} tokens)",
                stage="start",
                remedy=f"choose a multiple of {self.page_tokens}",
            )

    def crossing(self, length: int, commit_len: int) -> Crossing | None:
        """The depth that committing ``commit_len`` tokens after ``length`` reaches or passes.

        None for a row that commits nothing, and where the next depth lies among tokens that were
        rejected: a state that has seen those must never be kept.
        """
        if commit_len <= 0:
            return None
        depth = self.deepest(length + commit_len)
        return Crossing(depth, depth - length) if depth > length else None

    def deepest(self, length: int) -> int:
        """The deepest grid depth within ``length`` tokens; 0 when there is none."""
        return length // self.interval_tokens * self.interval_tokens

    def chunk_stop(self, start: int, stop: int) -> int:
        """Where a prefill chunk ``[start, stop)`` must end so that its last state is on the grid, if
        a depth lies inside.
        """
        first = self.deepest(start) + self.interval_tokens
        return min(stop, first)
