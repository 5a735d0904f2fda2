"""NIXL's own faults, between processes: dead, stopped and reborn peers, foreign memory, noise, idleness."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from sluice.errors import InternalError, PeerLost, SluiceError, TransferFailed
from sluice.transfer.nixl import NixlPlane
from sluice.transfer.plane import Pack, Write
from sluice.transfer.staging import StagingUse
from sluice.transfer.worker import TransferWorker, WorkerConfig
from tests.contract.planes import (
    NUM_ROWS,
    ROOT,
    SIZE,
    WAIT_S,
    Planes,
    new_arena,
    row_writes,
)
from tests.contract.target_process import ROW_BYTES, endpoint_from_json, regions_of
from tests.unit.transfer.worker_rig import wait_until

# NIXL between processes, and what its wheel does by default.


class _Target:
    """The other process (`target_process`)."""

    def __init__(self, size: int, tls: str | None) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        if tls is not None:
            environment["UCX_TLS"] = tls
        name = f"decode-{uuid.uuid4().hex[:8]}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.target_process", name, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
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
        self.process.communicate(timeout=WAIT_S)


@pytest.fixture
def start_target() -> Iterator[Callable[..., _Target]]:
    started: list[_Target] = []

    def start(size: int = SIZE, tls: str | None = None) -> _Target:
        started.append(_Target(size, tls))
        return started[-1]

    yield start
    for target in started:
        target.close()


@pytest.fixture
def start_worker() -> Iterator[Callable[..., tuple[TransferWorker, Tensor]]]:
    workers: list[TransferWorker] = []

    def start(
        config: WorkerConfig | None = None, size: int = SIZE
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
    return row_writes(source, base, [(row, last - row) for row in range(last + 1)])


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
    link = worker.connect(target.endpoint).result(WAIT_S)
    ticket = worker.submit(link, _reversed_rows(source, target.base), None, WAIT_S)
    assert ticket.future.result(WAIT_S).num_bytes == size
    assert ticket.settled.result(WAIT_S).clean
    assert target.arena_digest() == _sha(source.view(-1, ROW_BYTES).flip(0).reshape(-1))
    worker.disconnect(link).result(WAIT_S)


@pytest.mark.nixl
def test_killed_peer_is_lost_and_its_next_life_works(
    start_target: Callable[..., _Target],
    start_worker: Callable[..., tuple[TransferWorker, Tensor]],
) -> None:
    first = start_target(tls="tcp")
    worker, source = start_worker()
    link = worker.connect(first.endpoint).result(WAIT_S)
    writes = _reversed_rows(source, first.base)
    worker.submit(link, writes, None, WAIT_S).future.result(WAIT_S)

    first.process.send_signal(signal.SIGSTOP)  # so that the next groups are surely in flight
    ticket = worker.submit(link, writes, None, WAIT_S)
    time.sleep(0.1)
    assert not ticket.future.done()
    first.process.kill()
    with pytest.raises(PeerLost):
        ticket.future.result(WAIT_S)
    assert not ticket.settled.result(WAIT_S).clean
    with pytest.raises(PeerLost):
        worker.submit(link, writes, None, WAIT_S).future.result(WAIT_S)
    worker.disconnect(link).result(WAIT_S)

    second = start_target(tls="tcp")
    link = worker.connect(second.endpoint).result(WAIT_S)
    ticket = worker.submit(link, _reversed_rows(source, second.base), None, WAIT_S)
    assert ticket.future.result(WAIT_S).num_bytes == SIZE
    assert second.arena_digest() == _sha(source.view(-1, ROW_BYTES).flip(0).reshape(-1))


@pytest.mark.nixl
def test_stopped_peer_times_out_and_settles_when_it_wakes(
    start_target: Callable[..., _Target],
    start_worker: Callable[..., tuple[TransferWorker, Tensor]],
) -> None:
    """Over TCP; with CMA the kernel copies into a stopped process, and the transfer is done."""
    target = start_target(tls="tcp")
    worker, source = start_worker(WorkerConfig(grace_s=3.0, min_rate_bytes_s=1e9))
    link = worker.connect(target.endpoint).result(WAIT_S)
    first = row_writes(source, target.base, [(0, 0)])
    worker.submit(link, first, None, WAIT_S).future.result(WAIT_S)

    target.process.send_signal(signal.SIGSTOP)
    ticket = worker.submit(link, _reversed_rows(source, target.base), None, WAIT_S)
    with pytest.raises(TransferFailed, match="did not arrive in time"):
        ticket.future.result(WAIT_S)
    assert not ticket.settled.done(), "a deadline is not a fence"
    assert [stuck.num_bytes for stuck in worker.stuck()] == [SIZE]
    with pytest.raises(InternalError, match="unsettled"):
        worker.disconnect(link).result(WAIT_S)

    target.process.send_signal(signal.SIGCONT)
    assert ticket.settled.result(WAIT_S).clean
    assert worker.stuck() == ()
    assert target.arena_digest() == _sha(source.view(-1, ROW_BYTES).flip(0).reshape(-1))


def _every_second_row(source: Tensor, base: int) -> Pack:
    rows = tuple(range(1, source.numel() // ROW_BYTES, 2))
    return Pack(source.data_ptr(), ROW_BYTES, rows, ROW_BYTES, base)


def _dealt(source: Tensor) -> Tensor:
    rows = source.view(-1, ROW_BYTES)[1::2]
    return torch.cat((rows, torch.zeros_like(rows))).view(-1)


@pytest.mark.nixl
@pytest.mark.parametrize("ends", ["wakes", "dies"])
def test_a_packed_transfer_breaks_off(
    start_target: Callable[..., _Target],
    start_worker: Callable[..., tuple[TransferWorker, Tensor]],
    ends: str,
) -> None:
    """Gathered rows are on their way to a peer that stops: their staging slots are nobody's until it wakes or
    dies, and another peer gets its rows meanwhile.
    """
    size = 2 << 20
    target, other = start_target(size, "tcp"), start_target(size, "tcp")
    config = WorkerConfig(group_bytes=128 << 10, grace_s=3.0, min_rate_bytes_s=1e9)
    worker, source = start_worker(config, size)
    assert worker.staging() == StagingUse(2, 0, 0)
    link, other_link = (worker.connect(t.endpoint).result(WAIT_S) for t in (target, other))
    pack = _every_second_row(source, target.base)
    worker.submit(link, [pack], None, WAIT_S).future.result(WAIT_S)
    assert target.arena_digest() == _sha(_dealt(source))

    target.process.send_signal(signal.SIGSTOP)
    before = source.clone()
    source.random_(0, 256)
    stuck = worker.submit(link, [pack], None, WAIT_S)
    with pytest.raises(TransferFailed, match="did not arrive in time"):
        stuck.future.result(WAIT_S)
    assert not stuck.settled.done()
    wait_until(lambda: worker.staging() == StagingUse(2, 0, 2))  # each group has its own deadline
    moves = [_every_second_row(source, other.base)]
    worker.submit(other_link, moves, None, WAIT_S).future.result(WAIT_S)
    assert other.arena_digest() == _sha(_dealt(source))

    if ends == "dies":
        target.process.kill()
        assert not stuck.settled.result(WAIT_S).clean
        with pytest.raises(PeerLost):
            worker.submit(link, [pack], None, WAIT_S).future.result(WAIT_S)
    else:
        target.process.send_signal(signal.SIGCONT)
        assert stuck.settled.result(WAIT_S).clean
        arrived = _dealt(before)
        arrived[: 2 * config.group_bytes] = _dealt(source)[: 2 * config.group_bytes]
        assert target.arena_digest() == _sha(arrived), "two groups were posted, and arrived whole"
    assert worker.staging() == StagingUse(2, 0, 0)


@pytest.mark.nixl
def test_peer_declared_gone_settles_its_tickets(
    start_target: Callable[..., _Target],
    start_worker: Callable[..., tuple[TransferWorker, Tensor]],
) -> None:
    target = start_target(tls="tcp")
    worker, source = start_worker()
    link = worker.connect(target.endpoint).result(WAIT_S)
    target.process.send_signal(signal.SIGSTOP)
    ticket = worker.submit(link, _reversed_rows(source, target.base), None, WAIT_S)
    time.sleep(0.1)
    assert not ticket.settled.done()
    worker.disconnect(link, peer_gone=True).result(WAIT_S)
    assert not ticket.settled.result(WAIT_S).clean
    with pytest.raises(PeerLost):
        ticket.future.result(WAIT_S)


@pytest.mark.nixl
def test_metadata_of_another_agent_is_refused() -> None:
    planes = Planes("nixl")
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
    planes = Planes("nixl")
    prefill, source, _ = planes.open("prefill")
    _, target, endpoint = planes.open("decode")
    beyond = dataclasses.replace(endpoint.regions[0], num_rows=2 * NUM_ROWS)
    link = prefill.connect(dataclasses.replace(endpoint, regions=(beyond,)))
    with pytest.raises(TransferFailed, match=r"4096 bytes into DRAM.*nixlNotFoundError"):
        prefill.post(link, row_writes(source, target.data_ptr(), [(0, NUM_ROWS)]))
    planes.close()


@pytest.mark.nixl
def test_an_idle_target_leaves_the_core_alone() -> None:
    """The wheel's progress thread busy-polls by default; ours wakes by file descriptor."""
    planes = Planes("nixl")
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
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    (line,) = result.stdout.splitlines()
    assert endpoint_from_json(line).agent_name == "quiet"


@pytest.mark.nixl
def test_without_ucx_the_plane_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "cma")  # no tcp: UCX can't handle a peer's death
    arena = new_arena(random_bytes=False)
    plane = NixlPlane("no-tcp", initiator=True)
    with pytest.raises(SluiceError, match="UCX_TLS must contain tcp"):
        plane.open(arena, regions_of(arena))
    plane.close()
