"""Staging: packs arrive as the rows they were, slots come back exactly once, a stuck peer keeps its own only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sluice.errors import Aborted, InternalError, PeerLost, TransferFailed
from sluice.transfer.plane import Pack, Write
from sluice.transfer.staging import STAGING_SLOTS, Staging, StagingUse, staging_slots, unpacked
from sluice.transfer.ticket import Ticket
from sluice.transfer.worker import WorkerConfig
from tests.unit.transfer.worker_rig import (
    KB,
    WAIT_S,
    Rig,
    new_arena,
    started_rigs,
    wait_until,
)

ROW = 64  # bytes; a 4 KB group holds 64 of them


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Rigs of 4 KB groups; 64 KB of arena make two staging slots."""
    with started_rigs() as start:

        def make(**config: float) -> Rig:
            rig = start(WorkerConfig(group_bytes=4 * KB, **config))  # type: ignore[arg-type]
            assert rig.worker.staging() == StagingUse(2, 0, 0)
            return rig

        yield make


def _deal(rig: Rig, target: Tensor, index: int = 1, count: int = 2, rows: int = 1024) -> list[Pack]:
    """Every ``count``-th row of the source, to the beginning of the target."""
    return [
        Pack(rig.source.data_ptr(), ROW, tuple(range(index, rows, count)), ROW, target.data_ptr())
    ]


def _dealt(rig: Rig, index: int = 1, count: int = 2, rows: int = 1024) -> Tensor:
    out = torch.zeros_like(rig.source).view(-1, ROW)
    taken = rig.source.view(-1, ROW)[index:rows:count]
    out[: len(taken)] = taken
    return out.view(-1)


def _held_in_mid_transfer(rig: Rig) -> tuple[Tensor, Ticket]:
    """A target whose fabric is held while a group of each of the two slots is in flight to it."""
    target, link = rig.peer("decode")
    rig.fabric.hold()
    ticket = rig.worker.submit(link, _deal(rig, target), None, 30.0)
    wait_until(lambda: rig.plane.in_flight == 2)
    return target, ticket


@st.composite
def _groups(draw: st.DrawFn) -> list[tuple[int, tuple[int, ...], int, int]]:
    """Packs of 128 rows of 16 bytes: offset, rows, piece bytes, destination."""
    size = draw(st.integers(1, 16))
    offset = draw(st.integers(0, 16 - size))
    rows = st.lists(st.integers(0, 127), min_size=1, max_size=20).map(tuple)
    packs = draw(st.lists(rows, min_size=1, max_size=3))
    return [(offset, one, size, 1000 * index) for index, one in enumerate(packs)]


@given(_groups(), st.integers(0, 1))
def test_a_gathered_pack_is_its_pieces_end_to_end(
    packs: list[tuple[int, tuple[int, ...], int, int]], slot: int
) -> None:
    arena = torch.randint(0, 256, (300 + 128 * 16,), dtype=torch.uint8)[300:]
    staging = Staging(arena, KB, 2)
    taken = [staging.take(), staging.take()]
    assert sorted(taken) == [0, 1]  # type: ignore[type-var]
    base = arena.data_ptr()
    group = [Pack(base + first, 16, rows, size, at) for first, rows, size, at in packs]
    through = Write(base, 7, 3)
    *writes, last = staging.gather(slot, [*group, through])
    assert last == through, "what is in one stretch already isn't copied"
    for write, (first, rows, size, at) in zip(writes, packs, strict=True):
        start = write.source - staging.memory.data_ptr()
        assert slot * KB <= start <= start + write.num_bytes <= (slot + 1) * KB
        pieces = [arena.view(128, 16)[row, first : first + size] for row in rows]
        assert torch.equal(staging.memory[start : start + write.num_bytes], torch.cat(pieces))
        assert write.destination == at
    pieces_alone = unpacked(group)
    assert sum(w.num_bytes for w in pieces_alone) == sum(w.num_bytes for w in writes)
    assert pieces_alone[0].source == base + packs[0][0] + packs[0][1][0] * 16


def test_a_group_that_does_not_fit_is_refused() -> None:
    staging = Staging(arena := new_arena(), KB, 1)
    assert staging.take() == 0
    with pytest.raises(InternalError, match="1024 bytes is full"):
        staging.gather(0, [Pack(arena.data_ptr(), ROW, tuple(range(17)), ROW, 1)])


def test_a_slot_comes_back_once() -> None:
    staging = Staging(new_arena(), KB, 1)
    with pytest.raises(InternalError, match="isn't taken"):
        staging.give(0)
    assert staging.take() == 0
    assert staging.take() is None
    staging.quarantine(0)
    assert staging.use() == StagingUse(1, 0, 1)
    staging.give(0)
    assert staging.use() == StagingUse(1, 0, 0)
    for misuse in (staging.give, staging.quarantine, lambda slot: staging.gather(slot, [])):
        with pytest.raises(InternalError, match="isn't taken"):
            misuse(0)


@pytest.mark.parametrize(
    ("state", "slots"), [(0, 1), (100 << 20, 3), (256 << 20, STAGING_SLOTS), (1 << 40, 8)]
)
def test_staging_is_a_small_part_of_the_state(state: int, slots: int) -> None:
    assert staging_slots(state, 4 << 20) == slots


def test_dealt_rows_leave_as_long_writes(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    target, link = rig.peer("decode")
    sizes: list[int] = []
    post = rig.plane.post

    def spy(link: object, writes: Sequence[Write]) -> object:
        sizes.extend(write.num_bytes for write in writes)
        return post(link, writes)  # type: ignore[arg-type]

    rig.plane.post = spy  # type: ignore[method-assign,assignment]
    ticket = rig.worker.submit(link, _deal(rig, target), None, 5.0)
    assert ticket.future.result(WAIT_S).num_bytes == 512 * ROW
    assert torch.equal(target, _dealt(rig))
    assert sizes == [4 * KB] * 8, "512 rows of 64 bytes in 8 writes"
    assert rig.worker.staging() == StagingUse(2, 0, 0)


def test_a_slot_is_not_used_again_before_its_group_has_arrived(
    make_rig: Callable[..., Rig],
) -> None:
    """While the peer is held nothing has been read from the slots: the third group must wait."""
    rig = make_rig()
    target, ticket = _held_in_mid_transfer(rig)
    time.sleep(0.02)
    assert rig.worker.staging() == StagingUse(2, 2, 0)
    assert rig.plane.most_in_flight == 2, "four may be in flight, but there are two slots"
    rig.fabric.resume()
    ticket.future.result(WAIT_S)
    assert torch.equal(target, _dealt(rig))


def test_every_peer_gets_slots(make_rig: Callable[..., Rig]) -> None:
    """Four ranks want two slots: all of them advance, none takes its turn twice before the others."""
    rig = make_rig()
    peers = [rig.peer(f"decode-{rank}") for rank in range(4)]
    rig.fabric.hold()
    tickets = [
        rig.worker.submit(link, _deal(rig, target, rank, 4), None, 30.0)
        for rank, (target, link) in enumerate(peers)
    ]
    wait_until(lambda: rig.plane.in_flight == 2)
    rig.fabric.resume()
    for rank, (ticket, (target, _)) in enumerate(zip(tickets, peers, strict=True)):
        ticket.future.result(WAIT_S)
        assert torch.equal(target, _dealt(rig, rank, 4))
    half = rig.plane.posts[: len(rig.plane.posts) // 2]
    assert set(half) == {f"decode-{rank}" for rank in range(4)}


def test_an_abort_in_mid_transfer_gives_slots_back_when_they_settle(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig()
    target, ticket = _held_in_mid_transfer(rig)
    ticket.revoke()
    with pytest.raises(Aborted):
        ticket.future.result(WAIT_S)
    assert rig.worker.staging() == StagingUse(2, 2, 0), "they may still be read"
    rig.fabric.resume()
    assert ticket.settled.result(WAIT_S).clean
    assert rig.worker.staging() == StagingUse(2, 0, 0)
    arrived = 2 * 4 * KB
    assert torch.equal(target[:arrived], _dealt(rig)[:arrived])
    assert not target[arrived:].any(), "no group is posted after the revocation"


def test_a_peer_that_dies_in_mid_transfer_gives_its_slots_back(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig()
    _, ticket = _held_in_mid_transfer(rig)
    rig.fabric.kill("decode")
    with pytest.raises(PeerLost):
        ticket.future.result(WAIT_S)
    ticket.settled.result(WAIT_S)
    rig.fabric.resume()
    assert rig.worker.staging() == StagingUse(2, 0, 0)
    other, other_link = rig.peer("decode-2")
    rig.worker.submit(other_link, _deal(rig, other), None, 5.0).future.result(WAIT_S)
    assert torch.equal(other, _dealt(rig))


def test_a_stuck_peer_keeps_its_slots_and_nobody_else_waits_for_them(
    make_rig: Callable[..., Rig],
) -> None:
    """Past their deadline its slots are quarantined, like pages. Others then send row by row."""
    rig = make_rig(grace_s=0.05, min_rate_bytes_s=1e6)
    target, link = rig.peer("decode")
    other, other_link = rig.peer("decode-2")
    rig.fabric.hold("decode")
    stuck = rig.worker.submit(link, _deal(rig, target), None, 30.0)
    with pytest.raises(TransferFailed, match="did not arrive in time"):
        stuck.future.result(WAIT_S)
    wait_until(lambda: rig.worker.staging() == StagingUse(2, 0, 2))
    rig.worker.submit(other_link, _deal(rig, other), None, 5.0).future.result(WAIT_S)
    assert torch.equal(other, _dealt(rig))
    assert rig.worker.staging() == StagingUse(2, 0, 2)
    before = rig.source.clone()
    rig.source.fill_(7)  # its rows may be somebody else's by now; what was gathered stays
    rig.fabric.resume()
    assert stuck.settled.result(WAIT_S).clean
    assert rig.worker.staging() == StagingUse(2, 0, 0)
    arrived = 2 * 4 * KB
    expected = before.view(-1, ROW)[1::2].reshape(-1)[:arrived]
    assert torch.equal(target[:arrived], expected)


def test_a_wait_for_a_slot_ends_with_the_ticket(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    target, link = rig.peer("decode")
    other, other_link = rig.peer("decode-2")
    rig.fabric.hold("decode")
    rig.worker.submit(link, _deal(rig, target), None, 30.0)
    wait_until(lambda: rig.worker.staging() == StagingUse(2, 2, 0))
    late = rig.worker.submit(other_link, _deal(rig, other), None, 0.05)
    with pytest.raises(TransferFailed, match=r"not done within 0\.1 s"):
        late.future.result(WAIT_S)
    assert late.settled.result(WAIT_S).clean, "it never posted anything"


def test_a_failing_gather_fails_its_ticket_only(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    target, link = rig.peer("decode")
    outside = [Pack(rig.source.data_ptr(), ROW, (0, 2), ROW, target.data_ptr() + target.numel())]
    with pytest.raises(TransferFailed, match="outside"):
        rig.worker.submit(link, outside, None, 5.0).future.result(WAIT_S)
    assert rig.worker.staging() == StagingUse(2, 0, 0)
    rig.worker.submit(link, _deal(rig, target), None, 5.0).future.result(WAIT_S)
    assert torch.equal(target, _dealt(rig))
