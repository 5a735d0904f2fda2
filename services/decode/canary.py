"""A synthetic request that moves every component from one prefill pod, proves each by its digest, and is timed."""

from __future__ import annotations

import random
import time
import uuid

from services.decode.attempts import Attempts
from services.decode.metering import DecodeMetrics
from sluice.errors import TransferFailed, as_sluice_error
from sluice.layout.layout import Layout
from sluice.rpc.messages import CanaryStatus, GenerateCall
from sluice.transfer.messages import Moved
from sluice.types import AttemptId, RequestId, Sampling

_TIMEOUT_S = 10.0


class Canary:
    """Long enough that no component's span is empty: one closed block of every ratio, an open one, a full window.

    It waits in line like any request, holds a prompt's rows for as long as it takes, and decodes nothing.
    ``floor_bytes_s`` is what the largest component must reach on the wire; 0 = whatever it does.
    """

    def __init__(
        self,
        attempts: Attempts,
        layout: Layout,
        vocab_size: int,
        metrics: DecodeMetrics,
        floor_bytes_s: float = 0.0,
    ) -> None:
        self._attempts = attempts
        self._metrics = metrics
        self._floor_bytes_s = floor_bytes_s
        largest = max((1, *layout.geometry.compression_ratios))
        tokens = max(layout.geometry.window_tokens, largest) + largest // 2 + 1
        self._prompt = tuple(random.Random(0).randrange(vocab_size) for _ in range(tokens))

    async def run(self, prefill_address: str) -> CanaryStatus:
        """Raises the typed error of whatever failed."""
        name = f"canary-{uuid.uuid4().hex}"
        call = GenerateCall(
            request_id=RequestId(name),
            attempt_id=AttemptId(name),
            prefill_address=prefill_address,
            prompt=self._prompt,
            sampling=Sampling(max_tokens=1),
            timeout_s=_TIMEOUT_S,
        )
        began = time.monotonic()
        outcome = "cancelled"
        try:
            complete = await self._attempts.canary(call)
            self._check_speed(complete.components)
            outcome = "passed"
        except Exception as error:
            outcome = as_sluice_error(error).code
            raise
        finally:
            seconds = time.monotonic() - began
            self._metrics.canary_ended(outcome, seconds)
        return CanaryStatus(
            time.time(), seconds, transport=complete.transport, components=complete.components
        )

    def _check_speed(self, components: tuple[Moved, ...]) -> None:
        """By the largest component: of a small one only the way there and back would be measured."""
        largest = max(components, key=lambda moved: moved.num_bytes)
        if largest.bytes_per_s < self._floor_bytes_s:
            raise TransferFailed(
                f"{largest.component}: {largest.num_bytes} bytes at {largest.bytes_per_s / 1e6:.3g} MB/s, "
                f"the floor is {self._floor_bytes_s / 1e6:.3g} MB/s",
                stage="canary",
                remedy="check the transport of this pair, or lower canary_floor_bytes_s",
            )
