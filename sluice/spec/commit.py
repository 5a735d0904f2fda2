"""Committing a verify step for models whose state is addressed by position: rollback is a shorter
length.

Every row that a rejected draft wrote lies at or above the new length and is written again at its
own position before anything reads it (see ``deepseek_v4_model`` reference, 4.3). Recurrent state
will need a real commit; this doesn't.
"""

from __future__ import annotations

from sluice.pools.base import RequestTables


def commit_by_length(tables: RequestTables, start: int, accepted: int) -> None:
    """After verifying tokens at ``start ..`` of which ``accepted`` drafts stand: ``start + accepted
    + 1`` are kept.
    """
    assert start == tables.kv_len, "a verify step starts where the committed state ends"
    tables.kv_len = start + accepted + 1
