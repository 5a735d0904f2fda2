"""A synthetic request that moves every component from one prefill pod and proves each by its digest."""

from __future__ import annotations

import random
import time
import uuid
from dataclasses import dataclass

from services.decode.attempts import Attempts
from sluice.layout.layout import Layout
from sluice.rpc.messages import GenerateCall
from sluice.transfer.messages import Moved
from sluice.types import AttemptId, RequestId, Sampling

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class CanaryResult:
    """What moved and how long it took."""

    seconds: float
    components: tuple[Moved, ...]


class Canary:
    """Long enough that no component's span is empty: one closed block of every ratio, an open one, a full window."""

    def __init__(self, attempts: Attempts, layout: Layout, vocab_size: int) -> None:
        self._attempts = attempts
        largest = max((1, *layout.geometry.compression_ratios))
        tokens = max(layout.geometry.window_tokens, largest) + largest // 2 + 1
        self._prompt = tuple(random.Random(0).randrange(vocab_size) for _ in range(tokens))

    async def run(self, prefill_address: str) -> CanaryResult:
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
        complete = await self._attempts.canary(call)
        return CanaryResult(time.monotonic() - began, complete.components)
