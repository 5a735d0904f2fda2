"""Whether a decode pod may take requests, and in one sentence why not."""

from __future__ import annotations

from dataclasses import dataclass

from services.decode.peers import Peers
from services.pod import Pod
from services.pod_metrics import Health
from sluice.pools.base import Occupancy


@dataclass(frozen=True)
class State:
    """``alive`` never depends on a peer; ``paired``: one prefill has agreed and its canary passed."""

    alive: bool
    paired: bool
    ready: bool
    reason: str


class Readiness:
    """Joins engine, data plane, peers and quarantine into one answer."""

    def __init__(self, pod: Pod, peers: Peers, max_quarantined_share: float) -> None:
        self._pod = pod
        self._peers = peers
        self._max_quarantined_share = max_quarantined_share
        self.draining = False
        self.state = State(True, False, False, "starting")

    def refresh(self) -> State:
        """Look again; the result is kept in ``state``."""
        dead = self._pod.dead
        paired = self._peers.paired()
        reason = self._reason(dead, paired)
        if not reason:
            reason = self._crowded()
        self.state = State(dead is None, paired and dead is None, not reason, reason)
        return self.state

    def health(self) -> Health:
        state = self.refresh()
        return Health("" if state.alive else state.reason, state.reason)

    def _reason(self, dead: BaseException | None, paired: bool) -> str:
        if dead is not None:
            return f"a thread died: {dead}"
        if self.draining:
            return "shutting down"
        if not paired:
            peers = [f"{p.address} {p.state} {p.reason}" for p in self._peers.statuses()]
            problem = self._peers.discovery_problem
            known = "; ".join(peers) or problem or "no peer is configured or discovered"
            return f"no prefill has agreed: {known}"
        return ""

    def _crowded(self) -> str:
        """Quarantined rows are safe but useless; past the bound the pod asks for help instead of starving."""
        occupancy = self._pod.engine.latest_stats.occupancy
        full = [space for space in occupancy if self._share(space) > self._max_quarantined_share]
        if not full:
            return ""
        spaces = ", ".join(f"{s.quarantined} of {s.total} {s.space.value}" for s in full)
        return f"quarantined: {spaces}; restart the prefill pods that hold them"

    def _share(self, space: Occupancy) -> float:
        return space.quarantined / space.total if space.total else 0.0
