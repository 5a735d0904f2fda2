"""One contract, two planes: what `transfer.plane` promises, held by loopback and by NIXL."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from sluice.errors import InternalError, PeerLost, TransferFailed
from sluice.pools.base import Region
from sluice.transfer.plane import HandleState, Polled, Write
from tests.contract.planes import (
    SIZE,
    Planes,
    expected_rows,
    new_arena,
    row_writes,
    scattered,
    settle_handle,
)
from tests.contract.target_process import ROW_BYTES, regions_of


@pytest.fixture(params=["loopback", pytest.param("nixl", marks=pytest.mark.nixl)])
def planes(request: pytest.FixtureRequest) -> Iterator[Planes]:
    made = Planes(request.param)
    yield made
    made.close()


def test_scattered_rows_arrive_and_nothing_else_changes(planes: Planes) -> None:
    prefill, source, _ = planes.open("prefill")
    _, target, endpoint = planes.open("decode")
    link = prefill.connect(endpoint)
    pairs = scattered(100)
    handles = [
        prefill.post(link, row_writes(source, target.data_ptr(), pairs[at : at + 25]))
        for at in range(0, 100, 25)
    ]
    for handle in handles:
        assert settle_handle(prefill, handle) == Polled(HandleState.DONE)
        prefill.release(handle)
    assert torch.equal(target, expected_rows(source, pairs))


def test_odd_sizes_and_unaligned_addresses(planes: Planes) -> None:
    prefill, source, _ = planes.open("prefill")
    _, target, endpoint = planes.open("decode")
    link = prefill.connect(endpoint)
    pieces = [(3, 5, 1), (100, 1001, 4097), (9000, 20001, 77)]
    writes = [Write(source.data_ptr() + s, target.data_ptr() + t, n) for s, t, n in pieces]
    assert settle_handle(prefill, prefill.post(link, writes)).state is HandleState.DONE
    expected = torch.zeros_like(target)
    for s, t, n in pieces:
        expected[t : t + n] = source[s : s + n]
    assert torch.equal(target, expected)


_OUT_OF_BOUNDS = (  # source offset, destination offset, size
    (0, SIZE, 1),
    (0, -1, 1),
    (0, SIZE - 10, 11),
    (SIZE - 10, 0, 11),
    (-1, 0, 1),
    (0, 0, 0),
    (0, 0, 2**64 - 4096),
    (0, 0, 2**64),
    (0, 0, -1),
)


def test_out_of_bounds_is_refused_and_harms_nothing(planes: Planes) -> None:
    prefill, source, _ = planes.open("prefill")
    _, target, endpoint = planes.open("decode")
    link = prefill.connect(endpoint)
    good = Write(source.data_ptr(), target.data_ptr(), ROW_BYTES)
    for source_at, target_at, num_bytes in _OUT_OF_BOUNDS:
        bad = Write(source.data_ptr() + source_at, target.data_ptr() + target_at, num_bytes)
        with pytest.raises(TransferFailed, match=r"outside|64-bit"):
            prefill.post(link, [good, bad])
    assert not target.any(), "a refused group sends nothing"
    assert settle_handle(prefill, prefill.post(link, [good])).state is HandleState.DONE


def test_declared_regions_bind_not_the_whole_arena(planes: Planes) -> None:
    """Registered memory that no region declares (another component's, alignment gaps) is out of bounds too."""
    prefill, source, _ = planes.open("prefill")
    decode, target = planes.make("decode"), new_arena(random_bytes=False)
    endpoint = decode.open(target, [Region("c", 0, target.data_ptr(), 4, ROW_BYTES)])
    link = prefill.connect(endpoint)
    with pytest.raises(TransferFailed, match="outside"):
        prefill.post(link, row_writes(source, target.data_ptr(), [(0, 4)]))
    with pytest.raises(TransferFailed, match="empty"):
        prefill.post(link, [])


def test_a_peers_impossible_region_is_refused_at_connect(planes: Planes) -> None:
    prefill, _, _ = planes.open("prefill")
    _, _, endpoint = planes.open("decode")
    wrapping = dataclasses.replace(endpoint.regions[0], address=2**64 - ROW_BYTES)
    with pytest.raises(TransferFailed, match="impossible region"):
        prefill.connect(dataclasses.replace(endpoint, regions=(wrapping,)))
    prefill.connect(endpoint)


def test_released_handles_are_dead(planes: Planes) -> None:
    prefill, source, _ = planes.open("prefill")
    _, target, endpoint = planes.open("decode")
    link = prefill.connect(endpoint)
    handle = prefill.post(link, row_writes(source, target.data_ptr(), [(0, 0)]))
    assert settle_handle(prefill, handle).state is HandleState.DONE
    prefill.release(handle)
    with pytest.raises(InternalError, match="after its release"):
        prefill.poll(handle)
    with pytest.raises(InternalError, match="after its release"):
        prefill.release(handle)


def test_connect_refuses_doubles_and_other_planes(planes: Planes) -> None:
    prefill, _, _ = planes.open("prefill")
    _, _, endpoint = planes.open("decode")
    with pytest.raises(TransferFailed, match="speaks carrier-pigeon"):
        prefill.connect(dataclasses.replace(endpoint, plane="carrier-pigeon"))
    link = prefill.connect(endpoint)
    with pytest.raises(TransferFailed, match="already"):
        prefill.connect(endpoint)
    prefill.disconnect(link)
    prefill.connect(endpoint)


def test_a_disconnected_link_is_dead(planes: Planes) -> None:
    prefill, source, _ = planes.open("prefill")
    _, target, endpoint = planes.open("decode")
    link = prefill.connect(endpoint)
    prefill.disconnect(link)
    with pytest.raises(TransferFailed, match="no connection"):
        prefill.post(link, row_writes(source, target.data_ptr(), [(0, 0)]))
    with pytest.raises(TransferFailed, match="no connection"):
        prefill.disconnect(link)
    assert not target.any()


def test_life_of_a_plane(planes: Planes) -> None:
    plane = planes.make("prefill")
    _, _, endpoint = planes.open("decode")
    with pytest.raises(InternalError, match="not open"):
        plane.connect(endpoint)
    arena = new_arena(random_bytes=False)
    plane.open(arena, regions_of(arena))
    with pytest.raises(InternalError, match="open"):
        plane.open(arena, regions_of(arena))
    plane.close()
    plane.close()
    with pytest.raises(InternalError, match="not open"):
        plane.connect(endpoint)


def test_five_lives_of_a_decode_pod(planes: Planes) -> None:
    """A new epoch comes with a new agent name, and the old link goes: nothing leaks into the next life."""
    prefill, source, _ = planes.open("prefill")
    for life in range(5):
        decode, target, endpoint = planes.open("decode")
        link = prefill.connect(endpoint)
        pairs = [(life, 3 * life), (life + 50, 200)]
        handle = prefill.post(link, row_writes(source, target.data_ptr(), pairs))
        assert settle_handle(prefill, handle).state is HandleState.DONE
        assert torch.equal(target, expected_rows(source, pairs))
        prefill.release(handle)
        prefill.disconnect(link)
        decode.close()


# Loopback's own switches.


def test_a_held_fabric_delivers_later_and_refuses_release() -> None:
    planes = Planes("loopback")
    prefill, source, _ = planes.open("prefill")
    _, target, endpoint = planes.open("decode")
    link = prefill.connect(endpoint)
    planes._fabric.hold(endpoint.agent_name)
    handle = prefill.post(link, row_writes(source, target.data_ptr(), [(1, 2)]))
    assert prefill.poll(handle).state is HandleState.POSTED
    with pytest.raises(InternalError, match="still writes"):
        prefill.release(handle)
    assert not target.any()
    planes._fabric.resume(endpoint.agent_name)
    assert prefill.poll(handle).state is HandleState.DONE
    assert torch.equal(target, expected_rows(source, [(1, 2)]))


def test_a_closed_loopback_peer_is_lost() -> None:
    planes = Planes("loopback")
    prefill, source, _ = planes.open("prefill")
    decode, target, endpoint = planes.open("decode")
    link = prefill.connect(endpoint)
    planes._fabric.hold()
    handle = prefill.post(link, row_writes(source, target.data_ptr(), [(1, 2)]))
    decode.close()
    polled = prefill.poll(handle)
    assert (polled.state, polled.peer_lost) == (HandleState.FAILED, True)
    assert link.lost
    with pytest.raises(PeerLost):
        prefill.post(link, row_writes(source, target.data_ptr(), [(1, 2)]))
    with pytest.raises(PeerLost):
        prefill.connect(dataclasses.replace(endpoint, agent_name="never-there"))


def test_a_plane_says_what_its_writes_go_over(planes: Planes) -> None:
    sender, source, _ = planes.open("prefill")
    _, target, endpoint = planes.open("decode")
    link = sender.connect(endpoint)
    handle = sender.post(link, row_writes(source, target.data_ptr(), scattered(8)))
    assert settle_handle(sender, handle).state is HandleState.DONE
    (way,) = sender.transports()
    assert way == "memory" if planes.kind == "loopback" else way.startswith(("cma", "tcp"))
