"""``sluice preflight``: real probes of this machine, and machines that lack something, as folders and numbers."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sluice.cli import preflight_checks as checks
from sluice.cli.__main__ import main
from sluice.cli.preflight_checks import Finding, Wanted
from sluice.cli.preflight_facts import Host, Ucx
from sluice.errors import CheckpointError
from sluice.models.manifest import manifest_digest

MODEL = Path(__file__).parent.parent.parent.parent / "models/tiny-dsv4"


@dataclass(frozen=True)
class Elsewhere(Host):
    """Another machine: its limits, GPUs and UCX are given."""

    limit: int | None = None
    gpu: tuple[int, str] = (0, "no driver")
    transports: Ucx = field(default_factory=Ucx)

    def memlock_bytes(self) -> int | None:
        return self.limit

    def gpus(self) -> tuple[int, str]:
        return self.gpu

    def ucx(self, environ: Mapping[str, str]) -> Ucx:
        return self.transports


def wanted(rdma: bool = False, imex: bool = False, digest: str = "", **settings: str) -> Wanted:
    own = {f"SLUICE_DECODE_{name}": value for name, value in settings.items()}
    own |= {name: value for name, value in settings.items() if name.startswith("UCX_")}
    return Wanted("decode", own, rdma, imex, digest)


def assert_fails(finding: Finding, *words: str) -> None:
    assert not finding.ok
    assert finding.remedy
    assert "\n" not in finding.line()
    for word in words:
        assert word in finding.line()


def test_this_machine_can_run_a_pod(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing injected: checkpoint, ports, UCX and all are the real ones."""
    monkeypatch.setenv("SLUICE_PREFILL_MODEL_DIR", str(MODEL))
    monkeypatch.setenv("SLUICE_PREFILL_LISTEN", "127.0.0.1:0")
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert main(["preflight", "--role", "prefill", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    names = [finding["check"] for finding in document["findings"]]
    assert document["ok"] is True
    assert names == ["checkpoint", "ports", "advertise", "gpu", "memlock", "rdma", "imex", "ucx"]


def test_a_lack_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SLUICE_ROUTER_MODEL_DIR", str(tmp_path))
    assert main(["preflight", "--role", "router"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["FAIL checkpoint", "ok   ports"]


def test_a_transport_that_ucx_lacks_is_named() -> None:
    """The real UCX, asked for a transport that exists nowhere."""
    heard = Host().ucx({"UCX_TLS": "no_such_wire,tcp"})
    assert heard.missing == ("no_such_wire",)
    assert_fails(
        checks.ucx(wanted(UCX_TLS="x"), Elsewhere(transports=heard)), "no_such_wire", "nixl.tls"
    )


def test_a_device_that_ucx_lacks_is_named() -> None:
    heard = Host().ucx({"UCX_NET_DEVICES": "mlx5_99:1"})
    assert "mlx5_99:1" in heard.missing


def test_a_nixl_that_doesnt_start_is_a_finding() -> None:
    heard = Host().ucx({"UCX_TLS": "cma"})  # no transport for connections
    assert "UCX" in heard.error
    assert_fails(checks.ucx(wanted(UCX_TLS="cma"), Elsewhere(transports=heard)), "must contain tcp")


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert_fails(checks.ports(wanted(LISTEN=address)), address, "EADDRINUSE")
        assert_fails(checks.ports(wanted(LISTEN="127.0.0.1:0", METRICS_LISTEN=address)), address)
    assert checks.ports(wanted(LISTEN=address)).ok


@pytest.mark.parametrize(
    ("advertise", "word"),
    [
        ("127.0.0.1:7200", "from this pod only"),
        ("0.0.0.0:7200", "no address others can call"),
        ("192.0.2.1:7200", "not an address of this pod"),  # a documentation network
        ("", "not host:port"),
        ("no-such-host.invalid:1", "doesn't resolve"),
    ],
)
def test_an_advertised_host_that_others_cant_reach_is_refused(advertise: str, word: str) -> None:
    finding = checks.advertise(wanted(ADVERTISE=advertise, DISCOVERY="kubernetes"))
    assert_fails(finding, word, "SLUICE_DECODE_ADVERTISE")


def test_loopback_is_fine_among_pods_of_one_machine() -> None:
    assert checks.advertise(wanted(LISTEN="127.0.0.1:7200", DISCOVERY="static")).ok


def test_memlock_matters_with_rdma_alone(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nCapEff:\t0000000000000000\n")
    tight = Elsewhere(status=status, limit=8 << 20)
    assert checks.memlock(wanted(), tight).ok
    assert_fails(checks.memlock(wanted(rdma=True), tight), "8388608", "LimitMEMLOCK", "rdma.asRoot")
    assert checks.memlock(wanted(rdma=True), Elsewhere(status=status, limit=None)).ok
    status.write_text("CapEff:\t0000000000004000\n")  # bit 14
    assert checks.memlock(wanted(rdma=True), tight).ok


def test_rdma_needs_a_device_its_verbs_and_a_link(tmp_path: Path) -> None:
    host = Elsewhere(infiniband=tmp_path / "ib", verbs=tmp_path / "verbs")
    assert checks.rdma(wanted(), host).ok
    assert_fails(checks.rdma(wanted(rdma=True), host), "no RDMA device", "rdma.resource")
    state = tmp_path / "ib/mlx5_0/ports/1/state"
    state.parent.mkdir(parents=True)
    state.write_text("1: DOWN\n")
    assert_fails(checks.rdma(wanted(rdma=True), host), "uverbs", "rdma.resource")
    (tmp_path / "verbs").mkdir()
    (tmp_path / "verbs/uverbs0").touch()
    assert_fails(checks.rdma(wanted(rdma=True), host), "mlx5_0", "cable")
    state.write_text("4: ACTIVE\n")
    finding = checks.rdma(wanted(rdma=True), host)
    assert finding.ok
    assert "mlx5_0:1" in finding.message


def test_imex_needs_a_channel(tmp_path: Path) -> None:
    host = Elsewhere(imex=tmp_path)
    assert checks.imex(wanted(), host).ok
    assert_fails(checks.imex(wanted(imex=True), host), str(tmp_path), "ComputeDomains")
    (tmp_path / "channel0").touch()
    assert checks.imex(wanted(imex=True), host).ok


def test_a_missing_gpu_is_named(tmp_path: Path) -> None:
    assert checks.gpu(wanted(DEVICE="cpu"), Elsewhere()).ok
    assert_fails(checks.gpu(wanted(DEVICE="cuda"), Elsewhere()), "no driver", "gpu.count")
    assert_fails(checks.gpu(wanted(DEVICE="cuda:1"), Elsewhere(gpu=(1, ""))), "1 GPUs visible")
    assert checks.gpu(wanted(DEVICE="cuda:1"), Elsewhere(gpu=(2, ""))).ok
    count, problem = Host(libcuda=str(tmp_path / "libcuda.so.1")).gpus()
    assert count == 0
    assert "no NVIDIA driver" in problem


def test_another_checkpoint_than_expected_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preflight", "--print-digest", str(MODEL)]) == 0
    digest = capsys.readouterr().out.strip()
    assert checks.checkpoint(wanted(MODEL_DIR=str(MODEL), digest=digest)).ok
    finding = checks.checkpoint(wanted(MODEL_DIR=str(MODEL), digest="0" * 32))
    assert_fails(finding, digest, "0" * 32, "model.digest")


def test_a_checkpoint_cut_off_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(MODEL, copy)
    weights = copy / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 1)
    with pytest.raises(CheckpointError, match=f"{size - 1} bytes of {size}"):
        manifest_digest(copy)
    weights.write_bytes(struct.pack("<Q", 1 << 60) + b"{")
    assert_fails(checks.checkpoint(wanted(MODEL_DIR=str(copy))), "no safetensors header")
    weights.unlink()
    assert_fails(checks.checkpoint(wanted(MODEL_DIR=str(copy))), "no *.safetensors")
    assert_fails(checks.checkpoint(wanted(MODEL_DIR=str(tmp_path / "none"))), "No such file")
    assert_fails(checks.checkpoint(wanted()), "SLUICE_DECODE_MODEL_DIR is not set")
