"""What decode and prefill say about an attempt survives the wire unchanged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.layout.span import Run
from sluice.rpc.convert_attempt import (
    complete_from_pb,
    complete_to_pb,
    start_from_pb,
    start_to_pb,
)
from sluice.transfer.messages import (
    AttemptComplete,
    AttemptStart,
    ComponentGrant,
    Moved,
    Timings,
)
from sluice.types import AttemptId, Epoch, RequestId
from sluice.v1 import prefill_pb2
from tests.unit.rpc.test_convert_sampling import logprobs, samplings

names = st.text(min_size=1, max_size=12)
numbers = st.integers(0, 2**31)
seconds = st.floats(0, 1e6)
grants = st.builds(
    ComponentGrant,
    component=names,
    runs=st.lists(st.builds(Run, first=numbers, count=numbers), max_size=4).map(tuple),
)
starts = st.builds(
    AttemptStart,
    attempt_id=names.map(AttemptId),
    request_id=names.map(RequestId),
    decode_epoch=names.map(Epoch),
    prefill_epoch=names.map(Epoch),
    agreement_digest=names,
    prompt=st.lists(st.integers(0, 130_000), min_size=1, max_size=20).map(tuple),
    sampling=samplings,
    timeout_s=seconds,
    have_tokens=st.integers(0, 1000),
    grants=st.lists(grants, max_size=3).map(tuple),
    want_digests=st.booleans(),
)
completes = st.builds(
    AttemptComplete,
    attempt_id=names.map(AttemptId),
    prefill_epoch=names.map(Epoch),
    first_token=st.integers(0, 130_000),
    prompt_tokens=st.integers(1, 10_000),
    cached_tokens=st.integers(0, 10_000),
    timings=st.builds(Timings, queue_s=seconds, prefill_s=seconds, transfer_s=seconds),
    components=st.lists(
        st.builds(Moved, component=names, rows=numbers, num_bytes=numbers, digest=st.binary()),
        max_size=3,
    ).map(tuple),
    first_logprobs=st.none() | logprobs,
    prompt_logprobs=st.none() | st.lists(logprobs, max_size=2).map(lambda scores: (None, *scores)),
)


@given(starts)
def test_start_round_trip(start: AttemptStart) -> None:
    wire = start_to_pb(start).SerializeToString()
    assert start_from_pb(prefill_pb2.Start.FromString(wire)) == start


@given(completes)
def test_complete_round_trip(complete: AttemptComplete) -> None:
    wire = complete_to_pb(complete).SerializeToString()
    assert complete_from_pb(prefill_pb2.Complete.FromString(wire)) == complete
