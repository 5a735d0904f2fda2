"""One contract, two planes: what `transfer.plane` promises, held by loopback and by NIXL; then NIXL's own faults."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sluice.errors import InternalError, PeerLost, SluiceError, TransferFailed
from sluice.pools.base import Region
from sluice.transfer.loopback import LoopbackFabric, LoopbackPlane
from sluice.transfer.nixl import NixlPlane
from sluice.transfer.plane import Endpoint, Handle, HandleState, Plane, Polled, Write
from sluice.transfer.worker import TransferWorker, WorkerConfig
from tests.contract.target_process import ROW_BYTES, endpoint_from_json, regions_of

_WAIT_S = 15.0
_NUM_ROWS = 256
_SIZE = _NUM_ROWS * ROW_BYTES
_ROOT = Path(__file__).parents[2]


class _Planes:
    """Makes planes of one kind that can reach each other, and closes them after the test."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._fabric = LoopbackFabric()
        self._opened: list[Plane] = []

    def make(self, role: str) -> Plane:
        name = f"{role}-{uuid.uuid4().hex[:8]}"
        plane: Plane
        if self.kind == "loopback":
            plane = LoopbackPlane(self._fabric, name)
        else:
            plane = NixlPlane(name, initiator=role == "prefill")
        self._opened.append(plane)
        return plane

    def open(self, role: str) -> tuple[Plane, Tensor, Endpoint]:
        plane, arena = self.make(role), _arena(random_bytes=role == "prefill")
        return plane, arena, plane.open(arena, regions_of(arena))

    def close(self) -> None:
        for plane in self._opened:
            plane.close()


@pytest.fixture(params=["loopback", pytest.param("nixl", marks=pytest.mark.nixl)])
def planes(request: pytest.FixtureRequest) -> Iterator[_Planes]:
    made = _Planes(request.param)
    yield made
    made.close()


def _arena(*, random_bytes: bool) -> Tensor:
    if random_bytes:
        return torch.randint(0, 256, (_SIZE,), dtype=torch.uint8)
    return torch.zeros(_SIZE, dtype=torch.uint8)


def _row_writes(source: Tensor, target_base: int, pairs: Sequence[tuple[int, int]]) -> list[Write]:
    return [
        Write(source.data_ptr() + s * ROW_BYTES, target_base + t * ROW_BYTES, ROW_BYTES)
        for s, t in pairs
    ]


def _settle(plane: Plane, handle: Handle, timeout_s: float = _WAIT_S) -> Polled:
    deadline = time.monotonic() + timeout_s
    while True:
        polled = plane.poll(handle)
        if polled.state is not HandleState.POSTED or time.monotonic() > deadline:
            return polled
        time.sleep(0.0005)


def _expected(source: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    out = torch.zeros(_SIZE, dtype=torch.uint8).view(-1, ROW_BYTES)
    for s, t in pairs:
        out[t] = source.view(-1, ROW_BYTES)[s]
    return out.view(-1)


def _scattered(count: int) -> list[tuple[int, int]]:
    dice = random.Random(7)
    return list(
        zip(dice.sample(range(_NUM_ROWS), count), dice.sample(range(_NUM_ROWS), count), strict=True)
    )


def test_scattered_rows_arrive_and_nothing_else_changes(planes: _Planes) -> None:
    prefill, source, _ = planes.open("prefill")
    _, target, endpoint = planes.open("decode")
    link = prefill.connect(endpoint)
    pairs = _scattered(100)
    handles = [
        prefill.post(link, _row_writes(source, target.data_ptr(), pairs[at : at + 25]))
        for at in range(0, 100, 25)
    ]
    for handle in handles:
        assert _settle(prefill, handle) == Polled(HandleState.DONE)
        prefill.release(handle)
    assert torch.equal(target, _expected(source, pairs))


def test_odd_sizes_and_unaligned_addresses(planes: _Planes) -> None:
    prefill, source, _ = planes.open("prefill")
    _, target, endpoint = planes.open("decode")
    link = prefill.connect(endpoint)
    pieces = [(3, 5, 1), (100, 1001, 4097), (9000, 20001, 77)]
    writes = [Write(source.data_ptr() + s, target.data_ptr() + t, n) for s, t, n in pieces]
    assert _settle(prefill, prefill.post(link, writes)).state is HandleState.DONE
    expected = torch.zeros_like(target)
    for s, t, n in pieces:
        expected[t : t + n] = source[s : s + n]
    assert torch.equal(target, expected)


_OUT_OF_BOUNDS = (  # source offset, destination offset, size
    (0, _SIZE, 1),
    (0, -1, 1),
    (0, _SIZE - 10, 11),
    (_SIZE - 10, 0, 11),
    (-1, 0, 1),
    (0, 0, 0),
    (0, 0, 2**64 - 4096),
    (0, 0, 2**64),
    (0, 0, -1),
)


def test_out_of_bounds_is_refused_and_harms_nothing(planes: _Planes) -> None:
    prefill, source, _ = planes.open("prefill")
    _, target, endpoint = planes.open("decode")
    link = prefill.connect(endpoint)
    good = Write(source.data_ptr(), target.data_ptr(), ROW_BYTES)
    for source_at, target_at, num_bytes in _OUT_OF_BOUNDS:
        bad = Write(source.data_ptr() + source_at, target.data_ptr() + target_at, num_bytes)
        with pytest.raises(TransferFailed, match=r"outside|64-bit"):
            prefill.post(link, [good, bad])
    assert not target.any(), "a refused group sends nothing"
    assert _settle(prefill, prefill.post(link, [good])).state is HandleState.DONE


def test_declared_regions_bind_not_the_whole_arena(planes: _Planes) -> None:
    """Registered memory that no region declares (another component's, alignment gaps) is out of bounds too."""
    prefill, source, _ = planes.open("prefill")
    decode, target = planes.make("decode"), _arena(random_bytes=False)
    endpoint = decode.open(target, [Region("c", 0, target.data_ptr(), 4, ROW_BYTES)])
    link = prefill.connect(endpoint)
    with pytest.raises(TransferFailed, match="outside"):
        prefill.post(link, _row_writes(source, target.data_ptr(), [(0, 4)]))
    with pytest.raises(TransferFailed, match="empty"):
        prefill.post(link, [])


def test_a_peers_impossible_region_is_refused_at_connect(planes: _Planes) -> None:
    prefill, _, _ = planes.open("prefill")
    _, _, endpoint = planes.open("decode")
    wrapping = dataclasses.replace(endpoint.regions[0], address=2**64 - ROW_BYTES)
    with pytest.raises(TransferFailed, match="impossible region"):
        prefill.connect(dataclasses.replace(endpoint, regions=(wrapping,)))
    prefill.connect(endpoint)


def test_released_handles_are_dead(planes: _Planes) -> None:
    prefill, source, _ = planes.open("prefill")
    _, target, endpoint = planes.open("decode")
    link = prefill.connect(endpoint)
    handle = prefill.post(link, _row_writes(source, target.data_ptr(), [(0, 0)]))
    assert _settle(prefill, handle).state is HandleState.DONE
    prefill.release(handle)
    with pytest.raises(InternalError, match="after its release"):
        prefill.poll(handle)
    with pytest.raises(InternalError, match="after its release"):
        prefill.release(handle)


def test_connect_refuses_doubles_and_other_planes(planes: _Planes) -> None:
    prefill, _, _ = planes.open("prefill")
    _, _, endpoint = planes.open("decode")
    with pytest.raises(TransferFailed, match="speaks carrier-pigeon"):
        prefill.connect(dataclasses.replace(endpoint, plane="carrier-pigeon"))
    link = prefill.connect(endpoint)
    with pytest.raises(TransferFailed, match="already"):
        prefill.connect(endpoint)
    prefill.disconnect(link)
    prefill.connect(endpoint)


def test_a_disconnected_link_is_dead(planes: _Planes) -> None:
    prefill, source, _ = planes.open("prefill")
    _, target, endpoint = planes.open("decode")
    link = prefill.connect(endpoint)
    prefill.disconnect(link)
    with pytest.raises(TransferFailed, match="no connection"):
        prefill.post(link, _row_writes(source, target.data_ptr(), [(0, 0)]))
    with pytest.raises(TransferFailed, match="no connection"):
        prefill.disconnect(link)
    assert not target.any()


def test_life_of_a_plane(planes: _Planes) -> None:
    plane = planes.make("prefill")
    _, _, endpoint = planes.open("decode")
    with pytest.raises(InternalError, match="not open"):
        plane.connect(endpoint)
    arena = _arena(random_bytes=False)
    plane.open(arena, regions_of(arena))
    with pytest.raises(InternalError, match="open"):
        plane.open(arena, regions_of(arena))
    plane.close()
    plane.close()
    with pytest.raises(InternalError, match="not open"):
        plane.connect(endpoint)


def test_five_lives_of_a_decode_pod(planes: _Planes) -> None:
    """A new epoch comes with a new agent name, and the old link goes: nothing leaks into the next life."""
    prefill, source, _ = planes.open("prefill")
    for life in range(5):
        decode, target, endpoint = planes.open("decode")
        link = prefill.connect(endpoint)
        pairs = [(life, 3 * life), (life + 50, 200)]
        handle = prefill.post(link, _row_writes(source, target.data_ptr(), pairs))
        assert _settle(prefill, handle).state is HandleState.DONE
        assert torch.equal(target, _expected(source, pairs))
        prefill.release(handle)
        prefill.disconnect(link)
        decode.close()


# Loopback's own switches.


def test_a_held_fabric_delivers_later_and_refuses_release() -> None:
    planes = _Planes("loopback")
    prefill, source, _ = planes.open("prefill")
    _, target, endpoint = planes.open("decode")
    link = prefill.connect(endpoint)
    planes._fabric.hold(endpoint.agent_name)
    handle = prefill.post(link, _row_writes(source, target.data_ptr(), [(1, 2)]))
    assert prefill.poll(handle).state is HandleState.POSTED
    with pytest.raises(InternalError, match="still writes"):
        prefill.release(handle)
    assert not target.any()
    planes._fabric.resume(endpoint.agent_name)
    assert prefill.poll(handle).state is HandleState.DONE
    assert torch.equal(target, _expected(source, [(1, 2)]))


def test_a_closed_loopback_peer_is_lost() -> None:
    planes = _Planes("loopback")
    prefill, source, _ = planes.open("prefill")
    decode, target, endpoint = planes.open("decode")
    link = prefill.connect(endpoint)
    planes._fabric.hold()
    handle = prefill.post(link, _row_writes(source, target.data_ptr(), [(1, 2)]))
    decode.close()
    polled = prefill.poll(handle)
    assert (polled.state, polled.peer_lost) == (HandleState.FAILED, True)
    assert link.lost
    with pytest.raises(PeerLost):
        prefill.post(link, _row_writes(source, target.data_ptr(), [(1, 2)]))
    with pytest.raises(PeerLost):
        prefill.connect(dataclasses.replace(endpoint, agent_name="never-there"))


# NIXL between processes, and what its wheel does by default.


class _Target:
    """The other process (`target_process`)."""

    def __init__(self, size: int, tls: str | None) -> None:
        environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        if tls is not None:
            environment["UCX_TLS"] = tls
        name = f"decode-{uuid.uuid4().hex[:8]}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.target_process", name, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=_ROOT,
        )
        assert self.process.stdout is not None
        self.endpoint = endpoint_from_json(self.process.stdout.readline())
        self.base = self.endpoint.regions[0].address

    def arena_digest(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("bytes\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate(timeout=_WAIT_S)


@pytest.fixture
def start_target() -> Iterator[Callable[..., _Target]]:
    started: list[_Target] = []

    def start(size: int = _SIZE, tls: str | None = None) -> _Target:
        started.append(_Target(size, tls))
        return started[-1]

    yield start
    for target in started:
        target.close()


@pytest.fixture
def start_worker() -> Iterator[Callable[..., tuple[TransferWorker, Tensor]]]:
    workers: list[TransferWorker] = []

    def start(
        config: WorkerConfig | None = None, size: int = _SIZE
    ) -> tuple[TransferWorker, Tensor]:
        worker = TransferWorker(
            NixlPlane(f"prefill-{uuid.uuid4().hex[:8]}", initiator=True), config
        )
        source = torch.randint(0, 256, (size,), dtype=torch.uint8)
        worker.start(source, regions_of(source))
        workers.append(worker)
        return worker, source

    yield start
    for worker in workers:
        worker.close(timeout_s=1.0)


def _sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().data).hexdigest()


def _reversed_rows(source: Tensor, base: int) -> list[Write]:
    last = source.numel() // ROW_BYTES - 1
    return _row_writes(source, base, [(row, last - row) for row in range(last + 1)])


@pytest.mark.nixl
@pytest.mark.parametrize("tls", [None, "tcp"])
def test_two_processes(
    start_target: Callable[..., _Target],
    start_worker: Callable[..., tuple[TransferWorker, Tensor]],
    tls: str | None,
) -> None:
    size = 8 << 20
    target = start_target(size, tls)
    worker, source = start_worker(WorkerConfig(group_bytes=1 << 20), size)
    link = worker.connect(target.endpoint).result(_WAIT_S)
    ticket = worker.submit(link, _reversed_rows(source, target.base), None, _WAIT_S)
    assert ticket.future.result(_WAIT_S).num_bytes == size
    assert ticket.settled.result(_WAIT_S).clean
    assert target.arena_digest() == _sha(source.view(-1, ROW_BYTES).flip(0).reshape(-1))
    worker.disconnect(link).result(_WAIT_S)


@pytest.mark.nixl
def test_killed_peer_is_lost_and_its_next_life_works(
    start_target: Callable[..., _Target],
    start_worker: Callable[..., tuple[TransferWorker, Tensor]],
) -> None:
    first = start_target(tls="tcp")
    worker, source = start_worker()
    link = worker.connect(first.endpoint).result(_WAIT_S)
    writes = _reversed_rows(source, first.base)
    worker.submit(link, writes, None, _WAIT_S).future.result(_WAIT_S)

    first.process.send_signal(signal.SIGSTOP)  # so that the next groups are surely in flight
    ticket = worker.submit(link, writes, None, _WAIT_S)
    time.sleep(0.1)
    assert not ticket.future.done()
    first.process.kill()
    with pytest.raises(PeerLost):
        ticket.future.result(_WAIT_S)
    assert not ticket.settled.result(_WAIT_S).clean
    with pytest.raises(PeerLost):
        worker.submit(link, writes, None, _WAIT_S).future.result(_WAIT_S)
    worker.disconnect(link).result(_WAIT_S)

    second = start_target(tls="tcp")
    link = worker.connect(second.endpoint).result(_WAIT_S)
    ticket = worker.submit(link, _reversed_rows(source, second.base), None, _WAIT_S)
    assert ticket.future.result(_WAIT_S).num_bytes == _SIZE
    assert second.arena_digest() == _sha(source.view(-1, ROW_BYTES).flip(0).reshape(-1))


@pytest.mark.nixl
def test_stopped_peer_times_out_and_settles_when_it_wakes(
    start_target: Callable[..., _Target],
    start_worker: Callable[..., tuple[TransferWorker, Tensor]],
) -> None:
    """Over TCP; with CMA the kernel copies into a stopped process, and the transfer is done."""
    target = start_target(tls="tcp")
    worker, source = start_worker(WorkerConfig(grace_s=0.3, min_rate_bytes_s=1e9))
    link = worker.connect(target.endpoint).result(_WAIT_S)
    first = _row_writes(source, target.base, [(0, 0)])
    worker.submit(link, first, None, _WAIT_S).future.result(_WAIT_S)

    target.process.send_signal(signal.SIGSTOP)
    ticket = worker.submit(link, _reversed_rows(source, target.base), None, _WAIT_S)
    with pytest.raises(TransferFailed, match="did not arrive in time"):
        ticket.future.result(_WAIT_S)
    assert not ticket.settled.done(), "a deadline is not a fence"
    assert [stuck.num_bytes for stuck in worker.stuck()] == [_SIZE]
    with pytest.raises(InternalError, match="unsettled"):
        worker.disconnect(link).result(_WAIT_S)

    target.process.send_signal(signal.SIGCONT)
    assert ticket.settled.result(_WAIT_S).clean
    assert worker.stuck() == ()
    assert target.arena_digest() == _sha(source.view(-1, ROW_BYTES).flip(0).reshape(-1))


@pytest.mark.nixl
def test_peer_declared_gone_settles_its_tickets(
    start_target: Callable[..., _Target],
    start_worker: Callable[..., tuple[TransferWorker, Tensor]],
) -> None:
    target = start_target(tls="tcp")
    worker, source = start_worker()
    link = worker.connect(target.endpoint).result(_WAIT_S)
    target.process.send_signal(signal.SIGSTOP)
    ticket = worker.submit(link, _reversed_rows(source, target.base), None, _WAIT_S)
    time.sleep(0.1)
    assert not ticket.settled.done()
    worker.disconnect(link, peer_gone=True).result(_WAIT_S)
    assert not ticket.settled.result(_WAIT_S).clean
    with pytest.raises(PeerLost):
        ticket.future.result(_WAIT_S)


@pytest.mark.nixl
def test_metadata_of_another_agent_is_refused() -> None:
    planes = _Planes("nixl")
    prefill, _, _ = planes.open("prefill")
    _, _, endpoint = planes.open("decode")
    refused: list[SluiceError] = []
    for lie in (
        dataclasses.replace(endpoint, agent_name="somebody-else"),
        dataclasses.replace(endpoint, metadata=b"not metadata"),
        dataclasses.replace(endpoint, memory="FILE"),
        dataclasses.replace(endpoint, device=-1),
    ):
        with pytest.raises(TransferFailed) as caught:
            prefill.connect(lie)
        refused.append(caught.value)
    assert "'decode-" in str(refused[0])
    prefill.connect(endpoint)
    planes.close()


@pytest.mark.nixl
def test_memory_the_peer_never_registered_is_refused() -> None:
    """The endpoint's regions are the peer's word; NIXL's metadata says what is really registered."""
    planes = _Planes("nixl")
    prefill, source, _ = planes.open("prefill")
    _, target, endpoint = planes.open("decode")
    beyond = dataclasses.replace(endpoint.regions[0], num_rows=2 * _NUM_ROWS)
    link = prefill.connect(dataclasses.replace(endpoint, regions=(beyond,)))
    with pytest.raises(TransferFailed, match=r"4096 bytes into DRAM.*nixlNotFoundError"):
        prefill.post(link, _row_writes(source, target.data_ptr(), [(0, _NUM_ROWS)]))
    planes.close()


@pytest.mark.nixl
def test_an_idle_target_leaves_the_core_alone() -> None:
    """The wheel's progress thread busy-polls by default; ours wakes by file descriptor."""
    planes = _Planes("nixl")
    planes.open("decode")
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.15
    planes.close()


@pytest.mark.nixl
def test_nothing_but_the_endpoint_is_printed() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NIXL_", "UCX_LOG"))}
    result = subprocess.run(
        [sys.executable, "-m", "tests.contract.target_process", "quiet", "4096"],
        input="exit\n",
        capture_output=True,
        text=True,
        timeout=60,
        env={**environment, "PYTHONPATH": str(_ROOT)},
        cwd=_ROOT,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    (line,) = result.stdout.splitlines()
    assert endpoint_from_json(line).agent_name == "quiet"


@pytest.mark.nixl
def test_without_ucx_the_plane_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "cma")  # no tcp: UCX can't handle a peer's death
    arena = _arena(random_bytes=False)
    plane = NixlPlane("no-tcp", initiator=True)
    with pytest.raises(SluiceError, match="UCX_TLS must contain tcp"):
        plane.open(arena, regions_of(arena))
    plane.close()
