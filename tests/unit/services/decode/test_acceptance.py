"""The alarm for a useless draft: not too early, once, and over only when it really is."""

from __future__ import annotations

import math

import pytest

from services.decode.acceptance import AcceptanceLimits, AcceptanceWatch

LIMITS = AcceptanceLimits(collapse_below=1.1, recover_above=1.25, min_steps=20, window_steps=50)


def watch(drafts: bool = True) -> AcceptanceWatch:
    return AcceptanceWatch(drafts, LIMITS)


def feed(watch: AcceptanceWatch, accepted: int, steps: int) -> None:
    for _ in range(steps):
        watch.step(accepted)


def test_a_few_bad_steps_say_nothing() -> None:
    one = watch()
    assert math.isnan(one.recent_tokens)
    feed(one, 0, LIMITS.min_steps - 1)
    assert not one.collapsed
    feed(one, 0, 1)
    assert one.collapsed
    assert one.status().recent_tokens == 1.0


def test_collapse_after_good_times_is_noticed_within_a_window_and_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = watch()
    feed(one, 2, 1000)
    assert one.recent_tokens == 3.0
    feed(one, 0, LIMITS.window_steps)
    assert one.collapsed
    feed(one, 0, 500)
    assert one.alarms == 1
    assert sum("acceptance_collapsed" in record.getMessage() for record in caplog.records) <= 1


def test_between_the_two_limits_nothing_changes() -> None:
    """A mean that hovers at one limit would ring all night."""
    one = watch()
    feed(one, 0, 50)
    feed(one, 1, 10)  # mean 1.2: above the first limit, below the second
    assert one.recent_tokens == pytest.approx(1.2)
    assert one.collapsed
    feed(one, 1, 3)
    assert not one.collapsed
    feed(one, 0, 37)  # 13 of 50 accepted, then ever fewer: 1.2 again after 3 more
    assert not one.collapsed
    assert one.alarms == 1


def test_without_a_draft_there_is_nothing_to_alarm_about() -> None:
    one = watch(drafts=False)
    feed(one, 0, 100)
    assert not one.collapsed
    assert not one.status().drafts


def test_the_mean_is_over_the_window_only() -> None:
    one = watch()
    feed(one, 3, 49)
    feed(one, 0, 1)
    feed(one, 1, 50)
    assert one.recent_tokens == 2.0
    assert one.status().steps == LIMITS.window_steps
