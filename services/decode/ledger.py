"""Where the time to a first token went: five stamps of one clock, so that the parts add up by themselves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sluice.transfer.messages import Timings


@dataclass
class Ledger:
    """Stamps of one attempt, monotonic seconds. Prefill adds durations, never stamps: its clock is another.

    ==============  ==============================================================================
    queue           until ``started``: our memory and the way to ``Start``; plus the wait on prefill
    prefill         the first chunk's turn to the last chunk's end
    transfer        the rest until ``completed``: writes not overlapped, digests there, two messages
    adopt           until ``proven``: rows and digests checked
    first decode    until the first token came out of our engine, which may be in the middle of a step
    ==============  ==============================================================================
    """

    arrived: float = field(default_factory=time.monotonic)
    started: float = 0.0
    completed: float = 0.0
    proven: float = 0.0

    def timings(self, prefill: Timings, first_token: float) -> Timings:
        """``prefill`` as it reported. No report can make a part negative or break the sum."""
        away_s = self.completed - self.started
        prefill_queue_s = min(max(prefill.queue_s, 0.0), away_s)
        prefill_s = min(max(prefill.prefill_s, 0.0), away_s - prefill_queue_s)
        transfer_s = away_s - prefill_queue_s - prefill_s
        return Timings(
            queue_s=self.started - self.arrived + prefill_queue_s,
            prefill_s=prefill_s,
            transfer_s=transfer_s,
            adopt_s=self.proven - self.completed,
            first_decode_s=first_token - self.proven,
            ttft_s=first_token - self.arrived,
            prefill_queue_s=prefill_queue_s,
            wire_s=min(prefill.transfer_s, transfer_s),
        )
