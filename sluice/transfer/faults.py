"""Named protocol steps where a test can hold a pod, withhold a component or damage a byte. Off unless configured.

A directory steers it from outside the process: while ``hold.NAME`` exists, whoever reaches NAME creates
``at.NAME`` and waits for ``hold.NAME`` to vanish. That makes "abort in the middle of a chunk" a fact, not a race.
``flip.COMPONENT`` damages one received byte of that component, once. While ``slow.link`` exists, the bytes a second in
it are what a prefill pod's link gives.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from sluice.layout.component import Component
from sluice.layout.span import Run
from sluice.transfer.digest import Buffers

_POLL_S = 0.005
_LONGEST_HOLD_S = 60.0  # a forgotten hold must not hang a pod for ever


class FaultPoint(Enum):
    """Steps of a request's life, in order."""

    DECODE_QUEUED = "decode.queued"  # before admission
    DECODE_GRANTED = "decode.granted"  # items reserved, Run not opened yet
    PREFILL_STARTED = "prefill.started"  # Start accepted, engine not asked yet
    PREFILL_CHUNK = "prefill.chunk"  # a non-final chunk was computed (holds the step thread)
    PREFILL_POST = "prefill.post"  # before a group of writes is posted (holds the I/O thread)
    PREFILL_COMPLETE = "prefill.complete"  # everything sent, Complete not said yet
    DECODE_ADOPTED = "decode.adopted"  # state accepted, first token not streamed yet


@dataclass(frozen=True)
class Faults:
    """What to do wrong. The default does nothing and costs one attribute test a step."""

    directory: Path | None = None
    withhold: frozenset[str] = frozenset()  # component names that are silently not sent

    def holds(self, point: FaultPoint) -> bool:
        if self.directory is None or not (self.directory / f"hold.{point.value}").exists():
            return False
        (self.directory / f"at.{point.value}").touch()
        return True

    def flips(self, component: str) -> bool:
        """Whether to damage this component now; asking uses the order up."""
        if self.directory is None:
            return False
        order = self.directory / f"flip.{component}"
        if not order.exists():
            return False
        order.unlink()
        return True

    def link_rate(self) -> float | None:
        """Bytes a second that the link is slowed to; None = it isn't."""
        if self.directory is None:
            return None
        try:
            return float((self.directory / "slow.link").read_text())
        except FileNotFoundError:
            return None

    async def reach(self, point: FaultPoint) -> None:
        """Wait here while a test holds this point."""
        deadline = time.monotonic() + _LONGEST_HOLD_S
        while self.holds(point) and time.monotonic() < deadline:  # noqa: ASYNC110  a file has no event
            await asyncio.sleep(_POLL_S)

    def reach_blocking(self, point: FaultPoint) -> None:
        """The same on a thread that is not the event loop's."""
        deadline = time.monotonic() + _LONGEST_HOLD_S
        while self.holds(point) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def flip_first_byte(memory: Buffers, component: Component, runs: Sequence[Run]) -> None:
    """Damage one bit of the first row that was received."""
    import torch

    if runs:
        row = memory.buffer(component.name, component.entries[0].layer_id)[runs[0].first]
        row.view(-1).view(torch.uint8)[0] ^= 1
