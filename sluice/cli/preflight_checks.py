"""What a pod needs of its node before it starts: each check gives one finding, in one line, with what to do."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.cli.preflight_facts import Host
from sluice.errors import CheckpointError
from sluice.models.manifest import manifest_digest

_LISTENERS = ("LISTEN", "METRICS_LISTEN", "HEALTH_LISTEN")


@dataclass(frozen=True)
class Wanted:
    """What the pod is going to need. ``environ`` holds its ``SLUICE_<ROLE>_*`` and ``UCX_*`` settings."""

    role: str
    environ: Mapping[str, str]
    rdma: bool = False
    imex: bool = False
    digest: str = ""

    def setting(self, name: str) -> str:
        return self.environ.get(f"SLUICE_{self.role.upper()}_{name}", "")


@dataclass(frozen=True)
class Finding:
    """``ok`` True: fine, or not needed. The ``remedy`` of a bad one says what to change where."""

    check: str
    ok: bool
    message: str
    remedy: str = ""

    def line(self) -> str:
        fix = f"; {self.remedy}" if self.remedy else ""
        return f"{'ok  ' if self.ok else 'FAIL'} {self.check}: {self.message}{fix}"


def findings(wanted: Wanted, host: Host) -> Iterator[Finding]:
    """Every check in the order in which a pod would stumble. Checks that a router doesn't need are left out."""
    yield checkpoint(wanted)
    yield ports(wanted)
    if wanted.role == "router":
        return
    yield advertise(wanted)
    yield gpu(wanted, host)
    yield memlock(wanted, host)
    yield rdma(wanted, host)
    yield imex(wanted, host)
    yield ucx(wanted, host)


def checkpoint(wanted: Wanted) -> Finding:
    folder = wanted.setting("MODEL_DIR")
    if not folder:
        name = f"SLUICE_{wanted.role.upper()}_MODEL_DIR"
        return Finding("checkpoint", False, f"{name} is not set", "say where the checkpoint is")
    try:
        digest = manifest_digest(Path(folder))
    except CheckpointError as error:
        return Finding("checkpoint", False, error.message, error.remedy)
    if wanted.digest and digest != wanted.digest:
        return Finding(
            "checkpoint",
            False,
            f"{folder} has digest {digest}, expected {wanted.digest}",
            "mount the checkpoint that was meant, or set model.digest to this one",
        )
    return Finding("checkpoint", True, f"{folder} is whole, digest {digest}")


def ports(wanted: Wanted) -> Finding:
    """Bound for a moment, as the pod will: another process's port shows now and not after the weights are loaded."""
    taken = []
    addresses = [wanted.setting(name) for name in _LISTENERS if wanted.setting(name)]
    for address in addresses:
        if reason := _cannot_bind(address):
            taken.append(f"{address} ({reason})")
    if taken:
        return Finding(
            "ports", False, f"can't listen on {', '.join(taken)}", "free it, or choose another port"
        )
    return Finding("ports", True, f"free: {', '.join(addresses) or 'none asked for'}")


def advertise(wanted: Wanted) -> Finding:
    """Other pods call this one at the advertised host: it must be an address of ours that they can reach."""
    name = f"SLUICE_{wanted.role.upper()}_ADVERTISE"
    address = wanted.setting("ADVERTISE") or wanted.setting("LISTEN")
    host = address.rpartition(":")[0].strip("[]")
    remedy = f"set {name} to this pod's own IP and port (in Kubernetes: status.podIP)"
    if not host:
        return Finding("advertise", False, f"{address!r} is not host:port", remedy)
    try:
        ip = ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0])
    except (OSError, ValueError) as error:
        return Finding("advertise", False, f"{host} doesn't resolve: {error}", remedy)
    if ip.is_unspecified:
        return Finding("advertise", False, f"{host} is no address others can call", remedy)
    if ip.is_loopback:
        if wanted.setting("DISCOVERY") == "kubernetes":
            return Finding("advertise", False, f"{host} is reachable from this pod only", remedy)
        return Finding("advertise", True, f"{host}: pods on this machine only")
    if reason := _cannot_bind(f"{host}:0"):
        return Finding(
            "advertise", False, f"{host} is not an address of this pod ({reason})", remedy
        )
    return Finding("advertise", True, f"{address} is an address of this pod")


def gpu(wanted: Wanted, host: Host) -> Finding:
    device = wanted.setting("DEVICE") or "cpu"
    if not device.startswith("cuda"):
        return Finding("gpu", True, f"not needed: device is {device}")
    count, problem = host.gpus()
    needed = int(device.partition(":")[2] or 0) + 1
    if count >= needed:
        return Finding("gpu", True, f"{count} visible")
    return Finding(
        "gpu",
        False,
        problem or f"device {device} asked for, {count} GPUs visible",
        "set gpu.count for the role, and see that the NVIDIA runtime and device plugin serve this node",
    )


def memlock(wanted: Wanted, host: Host) -> Finding:
    """RDMA pins the pod's whole state memory."""
    limit = host.memlock_bytes()
    if limit is None:
        return Finding("memlock", True, "unlimited")
    if host.may_lock():
        return Finding("memlock", True, f"limit {limit} bytes, lifted by CAP_IPC_LOCK")
    if not wanted.rdma:
        return Finding("memlock", True, f"limit {limit} bytes; not needed without RDMA")
    return Finding(
        "memlock",
        False,
        f"limit {limit} bytes and no effective CAP_IPC_LOCK: memory can't be registered for RDMA",
        "set LimitMEMLOCK=infinity for the nodes' container runtime, or rdma.asRoot (Linux gives the "
        "capability to uid 0 only)",
    )


def rdma(wanted: Wanted, host: Host) -> Finding:
    if not wanted.rdma:
        return Finding("rdma", True, "not needed")
    devices, active, verbs = host.rdma_devices(), host.active_ports(), host.verbs_devices()
    if devices and active and verbs:
        return Finding("rdma", True, f"active: {', '.join(active)}")
    if not devices or not verbs:
        missing = host.infiniband if not devices else host.verbs / "uverbs*"
        return Finding(
            "rdma",
            False,
            f"no RDMA device in this pod ({missing} is empty)",
            "set rdma.resource to what the nodes' RDMA device plugin offers (kubectl describe node)",
        )
    return Finding(
        "rdma",
        False,
        f"no port of {', '.join(devices)} is active",
        "look at the cable, the switch and the subnet manager (ibstat on the node)",
    )


def imex(wanted: Wanted, host: Host) -> Finding:
    if not wanted.imex:
        return Finding("imex", True, "not needed")
    if channels := host.imex_channels():
        return Finding("imex", True, ", ".join(channels))
    return Finding(
        "imex",
        False,
        f"no channel under {host.imex}",
        "install NVIDIA's DRA driver with ComputeDomains, and look at the pod's resourceClaims",
    )


def ucx(wanted: Wanted, host: Host) -> Finding:
    chosen = {name: value for name, value in wanted.environ.items() if name.startswith("UCX_")}
    heard = host.ucx(chosen)
    asked = ", ".join(
        f"{name}={chosen[name]}" for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in chosen
    )
    if heard.missing:
        return Finding(
            "ucx",
            False,
            f"not available here: {', '.join(heard.missing)} (of {asked})",
            "correct nixl.tls or nixl.netDevices, or give the pod the device",
        )
    if heard.error:
        return Finding(
            "ucx", False, f"NIXL doesn't start with {asked or 'default settings'}: {heard.error}",
            "UCX_TLS must contain tcp; UCX_NET_DEVICES must be devices of this pod",
        )  # fmt: skip
    return Finding("ucx", True, asked or "every transport that UCX finds")


def _cannot_bind(address: str) -> str:
    """Why not, in the system's words; empty when it can."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except (OSError, ValueError) as error:
        return errno.errorcode.get(getattr(error, "errno", 0) or 0, "") or str(error)
    return ""
