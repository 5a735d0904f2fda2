"""Verify reads, commit writes: at every accepted length, for every layer, for the right rows only."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from sluice.errors import IllegalTransition, InternalError
from sluice.models.capture import HiddenCapture
from sluice.models.kimi_linear.model import KimiLinearTarget
from sluice.models.kimi_linear.pending import KimiPendingVerify
from sluice.pools.base import RequestTables
from tests.unit.models.kimi_linear.tiny import (
    VERIFY_TOKENS,
    Driver,
    State,
    prompt,
    tiny_target,
)


@pytest.fixture(scope="module")
def target() -> KimiLinearTarget:
    return tiny_target()


@pytest.fixture
def driver(target: KimiLinearTarget) -> Driver:
    return Driver(target)


def _block(length: int) -> tuple[int, ...]:
    """What comes after a prompt of that length: the anchor and its drafts."""
    return prompt(length + VERIFY_TOKENS)[length:]


def _serial(driver: Driver, length: int) -> tuple[list[State], torch.Tensor]:
    """States after 0 .. block tokens decoded one by one, and their logits."""
    tables = driver.open(prompt(length))
    states, logits = [driver.state(tables)], []
    for token in _block(length):
        logits.append(driver.feed([(tables, (token,))]))
        states.append(driver.state(tables))
    driver.memory.close(tables)
    return states, torch.cat(logits)


@pytest.mark.parametrize("length", [1, 2, 3, 18, 95, 126])
def test_commit_at_every_length_equals_serial_decode_bit_for_bit(
    driver: Driver, length: int
) -> None:
    """Columns, matrices and counts of all layers; a count of 1 (no draft stood) is a real commit."""
    states, _ = _serial(driver, length)
    for count in range(VERIFY_TOKENS + 1):
        tables = driver.open(prompt(length))
        _, pending = driver.verify([(tables, _block(length))])
        assert driver.state(tables).equals(states[0])  # verifying wrote nothing
        pending.commit([count])
        assert driver.state(tables).equals(states[count])
        assert count == 0 or not states[count].equals(states[count - 1])
        driver.memory.close(tables)


def test_states_inside_a_verify_equal_serial_decode(driver: Driver) -> None:
    """What a snapshot at a crossed depth would store."""
    states, _ = _serial(driver, 20)
    tables = driver.open(prompt(20))
    _, pending = driver.verify([(tables, _block(20))])
    assert isinstance(pending, KimiPendingVerify)
    for count, state in enumerate(states):
        assert torch.equal(torch.stack(pending.states(0, count)), state.recurrent)
        assert torch.equal(torch.stack(pending.columns(0, count)), state.conv)
    pending.discard()
    driver.memory.close(tables)


@pytest.mark.optional(reason="needs matrix products whose rows don't depend on each other's number")
def test_verified_logits_equal_serial_decode_bit_for_bit(driver: Driver) -> None:
    x, w = torch.randn(8, 64), torch.randn(96, 64)
    if not torch.equal(F.linear(x, w)[:4], F.linear(x[:4], w)):
        pytest.skip("this CPU's matrix products depend on the number of rows")
    for length in (3, 60, 126):
        _, logits = _serial(driver, length)
        tables = driver.open(prompt(length))
        verified, pending = driver.verify([(tables, _block(length))])
        assert torch.equal(verified, logits)
        pending.discard()
        driver.memory.close(tables)


def test_rows_are_committed_each_at_its_own_length(driver: Driver) -> None:
    """Ragged blocks, a finished row, a row that keeps nothing, and a prefill chunk in one batch."""
    lengths, widths, counts = (2, 30, 17, 5), (5, 3, 1, 4), (4, 3, -1, 0)
    tables = [driver.open(prompt(length)) for length in lengths]
    newcomer = driver.open()
    steps: list[tuple[RequestTables, Sequence[int]]] = [
        (one, _block(length)[:width])
        for one, length, width in zip(tables, lengths, widths, strict=True)
    ]
    before = [driver.state(one) for one in tables]
    _, pending = driver.verify([*steps, (newcomer, prompt(40))], num_verify=4)
    newcomer.kv_len = 40
    assert driver.state(newcomer).length == 40  # a prefill chunk doesn't wait for the commit
    pending.commit(counts)
    for one, length, count, old in zip(tables, lengths, counts, before, strict=True):
        states, _ = _serial(driver, length)
        assert driver.state(one).equals(states[max(count, 0)])
        assert count > 0 or driver.state(one).equals(old)
    alone = driver.open(prompt(40))
    torch.testing.assert_close(
        driver.state(newcomer).recurrent, driver.state(alone).recurrent, rtol=1e-4, atol=1e-5
    )
    for one in (*tables, newcomer, alone):
        driver.memory.close(one)


def test_steps_with_commits_go_on_like_serial_decode(driver: Driver) -> None:
    """Wrong drafts after the accepted ones leave no trace in three following steps."""
    ids = prompt(60)
    plain, spec = driver.open(ids[:20]), driver.open(ids[:20])
    for accepted in (0, 3, 1):
        at = spec.kv_len
        right = ids[at : at + accepted + 1]
        wrong = tuple((token + 1) % 64 for token in ids[at + accepted + 1 : at + VERIFY_TOKENS])
        _, pending = driver.verify([(spec, right + wrong)])
        pending.commit([accepted + 1])
        spec.kv_len += accepted + 1
        for token in right:
            driver.feed([(plain, (token,))])
        assert driver.state(spec).equals(driver.state(plain))
    driver.memory.close(plain)
    driver.memory.close(spec)


def test_a_single_prompt_token_beside_wider_blocks(driver: Driver) -> None:
    """It shares the verified rows' rectangle; padding its row must not move its state further."""
    verified, plain, alone = (driver.open(prompt(n)) for n in (9, 20, 20))
    _, pending = driver.verify([(verified, _block(9)), (plain, _block(20)[:1])], num_verify=1)
    pending.commit([2])
    driver.feed([(alone, _block(20)[:1])])
    assert driver.state(plain).equals(driver.state(alone))


def test_a_verify_from_the_very_start(driver: Driver) -> None:
    """No token came before: what the slot holds (NaN here) is not read."""
    tables = driver.open()
    _, pending = driver.verify([(tables, prompt(VERIFY_TOKENS))])
    pending.commit([2])
    other = driver.open()
    for token in prompt(2):
        driver.feed([(other, (token,))])
    assert driver.state(tables).equals(driver.state(other))
    driver.memory.close(tables)
    driver.memory.close(other)


@pytest.mark.parametrize("ending", ["commit", "discard"])
def test_a_pending_verify_is_settled_once(driver: Driver, ending: str) -> None:
    tables = driver.open(prompt(8))
    _, pending = driver.verify([(tables, _block(8))])
    assert pending.is_open
    pending.commit([1]) if ending == "commit" else pending.discard()
    assert not pending.is_open
    with pytest.raises(IllegalTransition):
        pending.commit([1])
    with pytest.raises(IllegalTransition):
        pending.discard()
    driver.memory.close(tables)


def test_no_forward_while_a_verify_is_open(driver: Driver) -> None:
    """The production bug: nobody committed. Here the next forward says so."""
    tables, other = driver.open(prompt(8)), driver.open(prompt(3))
    _, pending = driver.verify([(tables, _block(8))])
    with pytest.raises(IllegalTransition, match="neither committed nor discarded"):
        driver.feed([(other, (1,))])
    with pytest.raises(IllegalTransition):
        driver.verify([(other, (1,))])
    pending.commit([2])
    driver.feed([(other, (1,))])
    driver.memory.close(tables)
    driver.memory.close(other)


def test_another_memory_is_not_held_up() -> None:
    """Two engines may share one loaded model."""
    target = tiny_target()
    left, right = Driver(target), Driver(target)
    _, pending = left.verify([(left.open(prompt(8)), _block(8))])
    right.feed([(right.open(), prompt(4))])
    pending.discard()


def test_discarding_and_going_on_is_noticed(driver: Driver) -> None:
    """kv_len moved, the state did not: the next forward refuses instead of drifting."""
    tables = driver.open(prompt(8))
    _, pending = driver.verify([(tables, _block(8))])
    pending.discard()
    tables.kv_len += 2
    with pytest.raises(InternalError, match=r"position 10.* taken in 8 tokens"):
        driver.feed([(tables, (5,))])
    driver.memory.close(tables)


def test_committing_another_length_than_kv_len_is_noticed(driver: Driver) -> None:
    tables = driver.open(prompt(8))
    _, pending = driver.verify([(tables, _block(8))])
    pending.commit([3])
    tables.kv_len += 2
    with pytest.raises(InternalError, match="taken in 11 tokens"):
        driver.verify([(tables, (5,))])
    driver.memory.close(tables)


class _Broken(HiddenCapture):
    def after_layer(self, layer: int, x_TD: torch.Tensor) -> None:
        if layer == 1:
            raise RuntimeError("the device gave up")


def test_a_forward_that_failed_half_way_is_not_continued(driver: Driver) -> None:
    """Two layers have taken the token in, the third has not."""
    tables = driver.open(prompt(8))
    with pytest.raises(RuntimeError, match="gave up"):
        driver.target.forward(driver.batch([(tables, (1,))]), driver.memory, _Broken(()))
    with pytest.raises(InternalError, match="taken in -1 tokens"):
        driver.feed([(tables, (1,))])


def test_a_verify_that_failed_half_way_changed_nothing(driver: Driver) -> None:
    tables = driver.open(prompt(8))
    before = driver.state(tables)
    batch = driver.batch([(tables, _block(8))])
    with pytest.raises(RuntimeError, match="gave up"):
        driver.target.verify(batch, driver.memory, 1, _Broken(()))
    assert driver.state(tables).equals(before)
    driver.feed([(tables, (1,))])


@pytest.mark.parametrize("counts", [[6], [-2], [1, 1], []])
def test_counts_that_do_not_fit_write_nothing(driver: Driver, counts: list[int]) -> None:
    tables = driver.open(prompt(8))
    before = driver.state(tables)
    _, pending = driver.verify([(tables, _block(8))])
    with pytest.raises(InternalError):
        pending.commit(counts)
    assert driver.state(tables).equals(before)
    pending.discard()
    driver.memory.close(tables)


def test_a_slot_that_changed_hands_is_not_written(driver: Driver) -> None:
    """A request ends between verify and commit, and its slot goes to another one."""
    tables = driver.open(prompt(8))
    slot = tables.slot
    _, pending = driver.verify([(tables, _block(8))])
    driver.memory.close(tables)
    heir = driver.open()
    assert heir.slot == slot
    before = driver.state(heir)
    with pytest.raises(InternalError, match=f"no longer holds slot {slot}"):
        pending.commit([2])
    pending.commit([-1])
    assert driver.state(heir).length == before.length
    assert torch.equal(driver.state(heir).conv.isnan(), before.conv.isnan())
    driver.memory.close(heir)


@pytest.mark.parametrize("num_verify", [0, 2])
def test_how_many_segments_can_be_verified(driver: Driver, num_verify: int) -> None:
    tables = driver.open(prompt(8))
    with pytest.raises(InternalError, match="segments to verify"):
        driver.verify([(tables, _block(8))], num_verify=num_verify)
    driver.memory.close(tables)
