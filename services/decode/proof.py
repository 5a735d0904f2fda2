"""The proof that state arrived: every row of every agreed component, and its bytes are the ones that were sent."""

from __future__ import annotations

from services.sides import Sides
from sluice.errors import DigestMismatch, SpanMismatch
from sluice.layout.negotiate import Agreement
from sluice.layout.reshard import grain_of
from sluice.layout.span import count_rows, live_ordinals, span
from sluice.pools.base import RequestTables, StateMemory
from sluice.transfer.faults import Faults, flip_first_byte
from sluice.transfer.messages import AttemptComplete
from sluice.transfer.side import Query


class Proof:
    """Checks what an attempt's ``Complete`` says against what lies in this pod's rows."""

    def __init__(self, memory: StateMemory, sides: Sides, faults: Faults) -> None:
        self._memory = memory
        self._sides = sides
        self._faults = faults

    async def check(
        self,
        complete: AttemptComplete,
        agreement: Agreement,
        tables: RequestTables,
        length: int,
        *,
        digests: bool,
    ) -> None:
        """For a prompt of ``length`` tokens. Raises ``SpanMismatch`` or ``DigestMismatch``, by component."""
        moved = {item.component: item for item in complete.components}
        for plan in agreement.plans:
            name = plan.name
            if name in self._faults.withhold:
                continue
            component = self._memory.component(name)
            runs = span(component, tables, length)
            rows = moved[name].rows if name in moved else 0
            if rows != count_rows(runs):
                raise SpanMismatch(
                    f"{name}: {rows} rows were sent, {count_rows(runs)} granted", stage="transfer"
                )
            if self._faults.flips(name):
                flip_first_byte(self._memory, component, runs)
            if not digests:
                continue
            first = live_ordinals(component, length).start
            query = Query(name, grain_of(plan), runs, first)
            (digest,) = await self._sides.digests([query])
            if digest != moved[name].digest:
                raise DigestMismatch(
                    f"{name}: sent {moved[name].digest.hex()}, received {digest.hex()}",
                    stage="transfer",
                    remedy="the bytes changed on the way; check the transport of this pair",
                )
