"""The I/O thread: results, deadlines, revocation, settling, fairness, death."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
import torch

from sluice.errors import Aborted, InternalError, PeerLost, TransferFailed
from sluice.pools.base import Region
from sluice.transfer.loopback import LoopbackFabric, LoopbackPlane
from sluice.transfer.plane import Write
from sluice.transfer.worker import TransferWorker, WorkerConfig
from tests.unit.transfer.worker_rig import (
    KB,
    WAIT_S,
    Rig,
    new_arena,
    started_rigs,
    wait_until,
)


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    with started_rigs() as make:
        yield make


def test_moves_rows_and_reports(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    target, link = rig.peer("decode")
    ticket = rig.worker.submit(link, rig.writes(target), None, 5.0)
    stats = ticket.future.result(WAIT_S)
    assert torch.equal(target, rig.expected())
    assert stats.num_bytes == 64 * KB
    assert 0 < stats.seconds < WAIT_S
    assert ticket.settled.result(WAIT_S).clean
    assert rig.plane.threads == {"sluice-transfer"}
    assert len(rig.plane.posts) == 16
    assert rig.worker.stuck() == ()


def test_an_empty_ticket_is_done_at_once(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    _, link = rig.peer("decode")
    ticket = rig.worker.submit(link, [], None, 5.0)
    assert ticket.future.result(WAIT_S).num_bytes == 0
    assert ticket.settled.result(WAIT_S).clean


def test_the_fence_is_passed_once_before_the_first_group(make_rig: Callable[..., Rig]) -> None:
    calls: list[str] = []
    rig = make_rig(before_post=lambda number: calls.append(f"post {number}"))
    target, link = rig.peer("decode")
    writes = rig.writes(target, range(12))
    ticket = rig.worker.submit(link, writes, lambda: calls.append("fence"), 5.0)
    ticket.future.result(WAIT_S)
    assert calls == ["fence", "post 0", "post 1", "post 2"]


def test_a_failing_fence_fails_its_ticket_only(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    target, link = rig.peer("decode")

    def fence() -> None:
        raise ValueError("device lost")

    bad = rig.worker.submit(link, rig.writes(target), fence, 5.0)
    with pytest.raises(InternalError, match="device lost"):
        bad.future.result(WAIT_S)
    assert bad.settled.result(WAIT_S).clean
    assert rig.plane.posts == []
    good = rig.worker.submit(link, rig.writes(target), None, 5.0)
    good.future.result(WAIT_S)


def test_the_window_bounds_what_is_in_flight(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(WorkerConfig(group_bytes=KB, max_in_flight=3))
    target, link = rig.peer("decode")
    rig.fabric.hold()
    tickets = [rig.worker.submit(link, rig.writes(target), None, 5.0) for _ in range(2)]
    wait_until(lambda: rig.plane.in_flight == 3)
    time.sleep(0.02)
    rig.fabric.resume()
    for ticket in tickets:
        ticket.future.result(WAIT_S)
    assert rig.plane.most_in_flight == 3


def test_tickets_take_turns(make_rig: Callable[..., Rig]) -> None:
    """A short ticket behind a long one of the same peer does not wait for all of it; peers alternate."""
    held = threading.Event()
    order: list[int] = []

    def before_post(number: int) -> None:
        order.append(number)
        assert held.wait(WAIT_S)

    rig = make_rig(WorkerConfig(group_bytes=KB), before_post=before_post)
    target, link = rig.peer("decode")
    other, other_link = rig.peer("decode-2")
    long = rig.worker.submit(link, rig.writes(target), None, 5.0)
    wait_until(lambda: order == [0])
    short = rig.worker.submit(link, rig.writes(target, range(2)), None, 5.0)
    elsewhere = rig.worker.submit(other_link, rig.writes(other, range(3)), None, 5.0)
    held.set()
    for ticket in (long, short, elsewhere):
        ticket.future.result(WAIT_S)
    assert order[:6] == [0, 1, 0, 0, 1, 2]  # long, long, elsewhere, short, elsewhere, long
    assert rig.plane.posts[:6].count("decode-2") >= 2


def test_a_group_deadline_fails_the_caller_but_the_handle_stays_tracked(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(WorkerConfig(group_bytes=4 * KB, grace_s=0.05, min_rate_bytes_s=1e6))
    target, link = rig.peer("decode")
    rig.fabric.hold("decode")
    ticket = rig.worker.submit(link, rig.writes(target), None, 30.0)
    with pytest.raises(TransferFailed, match="did not arrive in time"):
        ticket.future.result(WAIT_S)
    assert not ticket.settled.done()
    (stuck,) = rig.worker.stuck()
    assert (stuck.agent_name, stuck.num_groups, stuck.num_bytes) == ("decode", 4, 16 * KB)
    rig.fabric.resume()
    assert ticket.settled.result(WAIT_S).clean
    assert rig.worker.stuck() == ()
    assert len(rig.plane.posts) == 4, "nothing is posted after the failure"


def test_a_ticket_deadline_counts_waiting_behind_others(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    target, link = rig.peer("decode")
    rig.fabric.hold()
    rig.worker.submit(link, rig.writes(target), None, 30.0)
    wait_until(lambda: rig.plane.in_flight == 4)
    late = rig.worker.submit(link, rig.writes(target), None, 0.05)
    with pytest.raises(TransferFailed, match=r"not done within 0\.1 s"):
        late.future.result(WAIT_S)
    assert late.settled.result(WAIT_S).clean, "it never posted anything"


def test_revoke_posts_nothing_more_and_settles_what_is_posted(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig()
    target, link = rig.peer("decode")
    rig.fabric.hold()
    ticket = rig.worker.submit(link, rig.writes(target), None, 30.0)
    wait_until(lambda: rig.plane.in_flight == 4)
    ticket.revoke()
    with pytest.raises(Aborted, match="revoked"):
        ticket.future.result(WAIT_S)
    time.sleep(0.02)
    assert not ticket.settled.done()
    rig.fabric.resume()
    assert ticket.settled.result(WAIT_S).clean
    assert torch.equal(target, rig.expected(range(16))), "four posted groups arrived, no other"


def test_revoke_before_a_held_post_wins(make_rig: Callable[..., Rig]) -> None:
    """Between two groups a fault layer can hold the writer; a revocation then must stop that very post."""
    at_second, go_on = threading.Event(), threading.Event()

    def before_post(number: int) -> None:
        if number == 1:
            at_second.set()
            assert go_on.wait(WAIT_S)

    rig = make_rig(before_post=before_post)
    target, link = rig.peer("decode")
    ticket = rig.worker.submit(link, rig.writes(target), None, 30.0)
    assert at_second.wait(WAIT_S)
    ticket.revoke()
    go_on.set()
    assert ticket.settled.result(WAIT_S).clean
    assert len(rig.plane.posts) == 1
    assert torch.equal(target, rig.expected(range(4)))


def test_revoke_after_the_end_changes_nothing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    target, link = rig.peer("decode")
    ticket = rig.worker.submit(link, rig.writes(target), None, 5.0)
    stats = ticket.future.result(WAIT_S)
    ticket.revoke()
    assert ticket.future.result(WAIT_S) is stats
    assert ticket.settled.result(WAIT_S).clean


def test_futures_can_not_be_cancelled(make_rig: Callable[..., Rig]) -> None:
    """asyncio cancels the future it wraps; that must neither stop nor break the transfer."""
    rig = make_rig()
    target, link = rig.peer("decode")
    rig.fabric.hold()
    ticket = rig.worker.submit(link, rig.writes(target), None, 5.0)
    assert not ticket.future.cancel()
    assert not ticket.settled.cancel()
    rig.fabric.resume()
    assert ticket.future.result(WAIT_S).num_bytes == 64 * KB


def test_a_lost_peer_fails_its_tickets_only(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    target, link = rig.peer("decode")
    other, other_link = rig.peer("decode-2")
    rig.fabric.hold("decode")
    ticket = rig.worker.submit(link, rig.writes(target), None, 30.0)
    wait_until(lambda: rig.plane.in_flight == 4)
    rig.fabric.kill("decode")
    with pytest.raises(PeerLost, match="decode is gone"):
        ticket.future.result(WAIT_S)
    settlement = ticket.settled.result(WAIT_S)
    assert not settlement.clean
    assert "gone" in settlement.error
    fine = rig.worker.submit(other_link, rig.writes(other), None, 5.0)
    fine.future.result(WAIT_S)
    with pytest.raises(PeerLost):
        rig.worker.submit(link, rig.writes(target), None, 5.0).future.result(WAIT_S)
    rig.worker.disconnect(link).result(WAIT_S)


def test_out_of_region_writes_fail_the_ticket(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    target, link = rig.peer("decode")
    beyond = [Write(rig.source.data_ptr(), target.data_ptr() + target.numel(), KB)]
    with pytest.raises(TransferFailed, match="outside"):
        rig.worker.submit(link, beyond, None, 5.0).future.result(WAIT_S)
    assert rig.worker.failed is None


def test_disconnect_waits_for_the_caller_to_settle(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    target, link = rig.peer("decode")
    rig.fabric.hold()
    ticket = rig.worker.submit(link, rig.writes(target), None, 30.0)
    wait_until(lambda: rig.plane.in_flight == 4)
    with pytest.raises(InternalError, match="unsettled"):
        rig.worker.disconnect(link).result(WAIT_S)
    rig.worker.disconnect(link, peer_gone=True).result(WAIT_S)
    with pytest.raises(PeerLost):
        ticket.future.result(WAIT_S)
    assert not ticket.settled.result(WAIT_S).clean
    rig.worker.disconnect(link).result(WAIT_S)
    with pytest.raises(TransferFailed, match="no connection"):
        rig.worker.submit(link, rig.writes(target), None, 5.0).future.result(WAIT_S)
    assert rig.plane.in_flight == 0


def test_death_fails_everything_and_says_why(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    target, link = rig.peer("decode")
    rig.fabric.hold()
    ticket = rig.worker.submit(link, rig.writes(target), None, 30.0)
    wait_until(lambda: rig.plane.in_flight == 4)
    rig.plane.fail_poll = RuntimeError("driver bug")
    futures: list[Future[object]] = [ticket.future, ticket.settled]  # type: ignore[list-item]
    for future in futures:
        with pytest.raises(InternalError, match="driver bug"):
            future.result(WAIT_S)
    assert isinstance(rig.worker.failed, RuntimeError)
    with pytest.raises(InternalError, match="driver bug"):
        rig.worker.connect(rig.peers["decode"][2]).result(WAIT_S)
    late = rig.worker.submit(link, rig.writes(target), None, 5.0)
    with pytest.raises(InternalError, match="driver bug"):
        late.future.result(WAIT_S)
    assert late.settled.result(WAIT_S).clean, "it never posted anything"


def test_close_settles_first_and_refuses_later_work(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    target, link = rig.peer("decode")
    rig.fabric.hold()
    ticket = rig.worker.submit(link, rig.writes(target), None, 30.0)
    wait_until(lambda: rig.plane.in_flight == 4)
    threading.Timer(0.1, rig.fabric.resume).start()
    rig.worker.close()
    assert ticket.settled.result(0).clean
    assert rig.worker.failed is None
    with pytest.raises(InternalError, match="closed"):
        rig.worker.submit(link, rig.writes(target), None, 5.0).future.result(WAIT_S)
    rig.worker.close()


def test_close_gives_up_on_a_stuck_peer(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    target, link = rig.peer("decode")
    rig.fabric.hold()
    ticket = rig.worker.submit(link, rig.writes(target), None, 30.0)
    wait_until(lambda: rig.plane.in_flight == 4)
    started = time.monotonic()
    rig.worker.close(timeout_s=0.1)
    assert time.monotonic() - started < 2.0
    with pytest.raises(InternalError, match="closed"):
        ticket.settled.result(0)


def test_start_passes_the_planes_refusal_on() -> None:
    fabric = LoopbackFabric()
    arena = new_arena(4 * KB)
    worker = TransferWorker(LoopbackPlane(fabric, "prefill"))
    outside = [Region("c", 0, arena.data_ptr(), 5, KB)]
    with pytest.raises(TransferFailed, match="outside"):
        worker.start(arena, outside)
    assert worker.failed is None


def test_idle_costs_nothing_and_a_stuck_peer_little(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(WorkerConfig(group_bytes=KB, grace_s=0.01))
    target, link = rig.peer("decode")
    rig.fabric.hold()
    rig.worker.submit(link, rig.writes(target), None, 30.0)
    time.sleep(1.1)  # past the quick stages of the back-off
    before = rig.plane.polls
    time.sleep(0.25)
    assert (rig.plane.polls - before) / 4 <= 60, "four handles, 5 ms between polls"
    rig.fabric.resume()
    wait_until(lambda: rig.plane.in_flight == 0)
    used = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - used < 0.1
