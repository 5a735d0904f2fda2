"""What pods say of themselves survives the wire, with everything that may be absent absent."""

from __future__ import annotations

import pytest

from sluice.layout.component import Space
from sluice.pools.base import Occupancy
from sluice.rpc.convert_status import (
    prefill_status_from_pb,
    prefill_status_to_pb,
    status_from_pb,
    status_to_pb,
)
from sluice.rpc.messages import (
    Acceptance,
    CanaryStatus,
    DecodeStatus,
    PeerStatus,
    PoolComponent,
    PoolStatus,
    PrefillStatus,
    pool_statuses,
)
from sluice.transfer.messages import Moved
from sluice.types import Epoch
from tests.unit.layout.example_layouts import pair

POOL = PoolStatus("PAGE", 10, 4, 3, 2, 1, (PoolComponent("target.c4", 640),))
PREFILL = PrefillStatus(Epoch("pe"), True, "", 1, 2, 3, 4, (POOL,))
CANARY = CanaryStatus(1e9, 0.25, "why", "cma", (Moved("target.c4", 5, 640, b"d", 0.125),))


@pytest.mark.parametrize(
    "peer",
    [
        PeerStatus("p:1", "pe", "agreed", "r", "d", 4, CANARY, PREFILL),
        PeerStatus("p:1", "pe", "agreed"),
    ],
)
def test_a_decode_pods_status_survives(peer: PeerStatus) -> None:
    status = DecodeStatus(
        epoch=Epoch("e"),
        ready=True,
        reason="why",
        queued=1,
        running=2,
        max_model_tokens=3,
        peers=(peer,),
        pools=(POOL,),
        retractions=5,
        acceptance=Acceptance(True, 2.5, 100, True),
    )
    assert status_from_pb(status_to_pb(status)) == status


def test_a_prefill_pods_status_survives() -> None:
    assert prefill_status_from_pb(prefill_status_to_pb(PREFILL)) == PREFILL


def test_every_component_of_a_layout_is_in_exactly_one_pool() -> None:
    """Rings and state rows are numbered by slot: their bytes belong to that pool."""
    for layout in pair():
        spaces = (Space.PAGE, Space.WINDOW_PAGE, Space.REQUEST_SLOT)
        pools = pool_statuses([Occupancy(space, 4, 4, 0, 0) for space in spaces], layout)
        names = [component.name for pool in pools for component in pool.components]
        assert sorted(names) == sorted(component.name for component in layout.components)
        assert all(component.num_bytes > 0 for pool in pools for component in pool.components)
