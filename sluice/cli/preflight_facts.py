"""What `sluice preflight` looks at on a machine: real files, limits and devices, each replaceable in a test."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_CAP_IPC_LOCK = 14  # linux/capability.h
_PROBE_TIMEOUT_S = 30.0
_NOT_AVAILABLE = re.compile(r"(?:transports?|network devices?) (.*?) (?:is|are) not available")
# NIXL with the pod's own UCX settings, in a process of its own: UCX reads them once, and logs to a stream.
_START_UCX = """
from sluice.transfer.nixl_runtime import create_agent, load_nixl
create_agent(load_nixl(None), "preflight", progress_thread=False)
"""


@dataclass(frozen=True)
class Ucx:
    """``missing``: what UCX_TLS or UCX_NET_DEVICES name and UCX doesn't have. ``error``: why NIXL didn't start."""

    missing: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Host:
    """Where facts come from; the defaults are this machine."""

    infiniband: Path = Path("/sys/class/infiniband")
    verbs: Path = Path("/dev/infiniband")
    imex: Path = Path("/dev/nvidia-caps-imex-channels")
    status: Path = Path("/proc/self/status")
    libcuda: str = "libcuda.so.1"

    def memlock_bytes(self) -> int | None:
        """The soft limit on locked memory, None for none."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return None if soft == resource.RLIM_INFINITY else soft

    def may_lock(self) -> bool:
        """Does this process really have CAP_IPC_LOCK? Asked of the kernel: a pod's manifest may promise in vain."""
        for line in self.status.read_text(encoding="ascii").splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
        return False

    def active_ports(self) -> tuple[str, ...]:
        """RDMA ports whose link is up, as ``mlx5_0:1``."""
        states = sorted(self.infiniband.glob("*/ports/*/state"))
        return tuple(
            f"{state.parts[-4]}:{state.parts[-2]}"
            for state in states
            if "ACTIVE" in state.read_text(encoding="ascii")
        )

    def rdma_devices(self) -> tuple[str, ...]:
        return tuple(sorted(path.name for path in self.infiniband.glob("*")))

    def verbs_devices(self) -> tuple[str, ...]:
        """What a container needs of a NIC; without one, the device plugin gave it nothing."""
        return tuple(sorted(path.name for path in self.verbs.glob("uverbs*")))

    def imex_channels(self) -> tuple[str, ...]:
        return tuple(sorted(path.name for path in self.imex.glob("channel*")))

    def gpus(self) -> tuple[int, str]:
        """How many GPUs the driver shows, and why none. Asks libcuda itself: no torch, no memory taken."""
        try:
            cuda = ctypes.CDLL(self.libcuda)
        except OSError as error:
            return 0, f"no NVIDIA driver in this container ({error})"
        count = ctypes.c_int(0)
        code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
        return (0, f"the NVIDIA driver answers with error {code}") if code else (count.value, "")

    def ucx(self, environ: Mapping[str, str]) -> Ucx:
        """Start NIXL's UCX backend as the pod would and hear what it complains of."""
        asked = {**environ, "UCX_LOG_LEVEL": "warn", "UCX_LOG_FILE": "stderr"}
        try:
            done = subprocess.run(
                [sys.executable, "-c", _START_UCX],
                env={**os.environ, **asked},
                capture_output=True,
                text=True,
                timeout=_PROBE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return Ucx(error=f"NIXL didn't start within {_PROBE_TIMEOUT_S:.0f} s")
        heard = done.stderr + done.stdout  # NIXL has a mind of its own about streams
        missing = [
            n for names in _NOT_AVAILABLE.findall(heard) for n in re.findall(r"'(.*?)'", names)
        ]
        lines = done.stderr.strip().splitlines()
        return Ucx(tuple(missing), lines[-1] if done.returncode and lines else "")
