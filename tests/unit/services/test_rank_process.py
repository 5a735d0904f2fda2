"""A follower's end is its leader's: the kernel sees to it where the follower itself can't."""

from __future__ import annotations

import subprocess
import sys

import psutil

FOLLOWER = """
import sys, time
from services.rank_process import end_with_leader
end_with_leader()
print("follows", flush=True)
time.sleep(60)
"""
LEADER = """
import subprocess, sys, time
follower = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(follower.pid, follower.stdout.readline(), flush=True)
time.sleep(60)
"""


def test_a_frozen_follower_does_not_outlive_its_leader() -> None:
    """Decode frees what a pod may write to once nobody listens at the leader's port."""
    with subprocess.Popen(
        [sys.executable, "-c", LEADER, FOLLOWER], stdout=subprocess.PIPE, text=True
    ) as leader:
        assert leader.stdout is not None
        pid, said = leader.stdout.readline().split()
        assert said == "follows"
        follower = psutil.Process(int(pid))
        follower.suspend()
        leader.kill()
        try:
            assert psutil.wait_procs([follower], 10)[1] == []
        finally:
            if follower.is_running():
                follower.kill()
