"""Rollback by length."""

from __future__ import annotations

import pytest

from sluice.pools.base import RequestTables
from sluice.spec.commit import commit_by_length
from sluice.types import RequestId


def test_commit_keeps_accepted_drafts_and_the_token_before_them() -> None:
    tables = RequestTables(RequestId("r"), page_tokens=16, slot=1, kv_len=10)
    commit_by_length(tables, 10, 2)
    assert tables.kv_len == 13


def test_commit_of_a_step_that_started_elsewhere_is_a_bug() -> None:
    tables = RequestTables(RequestId("r"), page_tokens=16, slot=1, kv_len=10)
    with pytest.raises(AssertionError):
        commit_by_length(tables, 9, 2)
