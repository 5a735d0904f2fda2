"""What crosses the wire arrives equal; what this release doesn't know is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice import errors
from sluice.errors import BadRequest, LayoutRefused, SluiceError
from sluice.layout.layout import Layout
from sluice.layout.outcome import Mismatch, Severity
from sluice.pools.base import Region
from sluice.rpc.convert import (
    endpoint_from_pb,
    endpoint_to_pb,
    failure_from_pb,
    failure_to_pb,
    layout_from_pb,
    layout_to_pb,
    mismatch_from_pb,
    mismatch_to_pb,
)
from sluice.transfer.plane import Endpoint
from sluice.v1 import layout_pb2
from tests.unit.layout.example_layouts import SMALL, Pod, layout_of
from tests.unit.layout.strategies import large, layouts, small, text

ERROR_TYPES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, SluiceError)
]


@settings(max_examples=50)
@given(layouts)
def test_a_layout_arrives_equal(layout: Layout) -> None:
    wire = layout_to_pb(layout).SerializeToString()
    assert layout_from_pb(layout_pb2.Layout.FromString(wire)) == layout


@given(
    st.builds(
        Endpoint,
        text,
        text,
        st.binary(max_size=9),
        text,
        small,
        st.lists(st.builds(Region, text, small, large, large, large), max_size=2).map(tuple),
    )
)
def test_an_endpoint_arrives_equal(endpoint: Endpoint) -> None:
    wire = endpoint_to_pb(endpoint).SerializeToString()
    assert endpoint_from_pb(layout_pb2.Endpoint.FromString(wire)) == endpoint


@given(st.builds(Mismatch, text, text, text, st.sampled_from(Severity), text, text))
def test_a_mismatch_arrives_equal(mismatch: Mismatch) -> None:
    wire = mismatch_to_pb(mismatch).SerializeToString()
    assert mismatch_from_pb(layout_pb2.Mismatch.FromString(wire)) == mismatch


@pytest.mark.parametrize("kind", ERROR_TYPES)
def test_a_failure_arrives_as_the_class_that_was_raised(kind: type[SluiceError]) -> None:
    sent = kind("what happened", stage="grant", remedy="do this")
    wire = failure_to_pb(sent).SerializeToString()
    received = failure_from_pb(layout_pb2.Failure.FromString(wire))
    assert type(received) is kind
    assert str(received) == str(sent)
    assert received.retryable == sent.retryable


def test_a_failure_of_another_release_keeps_its_name_and_retryable_flag() -> None:
    failure = layout_pb2.Failure(code="PumpJammed", message="m", stage="s", retryable=True)
    received = failure_from_pb(failure)
    assert type(received) is SluiceError
    assert "PumpJammed: m" in str(received)
    assert received.retryable
    assert not SluiceError.retryable


@pytest.mark.parametrize("field", ["owner", "kind", "space", "coverage"])
def test_a_word_of_another_release_refuses_the_layout_by_field(field: str) -> None:
    layout = layout_to_pb(layout_of(SMALL, Pod()))
    setattr(layout.components[0], field, "NEW")
    with pytest.raises(LayoutRefused) as caught:
        layout_from_pb(layout)
    assert f"components[target.c4].{field} is 'NEW'" in str(caught.value)
    assert "same Sluice release" in caught.value.remedy


def test_an_unsharded_entry_is_not_an_entry_sharded_on_axis_0() -> None:
    layout = layout_to_pb(layout_of(SMALL, Pod()))
    assert not layout.components[0].entries[0].HasField("shard_axis")
    layout.components[0].entries[0].shard_axis = 0
    assert layout_from_pb(layout).components[0].entries[0].shard_axis == 0


def test_a_bad_request_still_names_its_field_on_the_other_side() -> None:
    sent = BadRequest("too long", field="max_tokens")
    received = failure_from_pb(failure_to_pb(sent))
    assert isinstance(received, BadRequest)
    assert received.field == "max_tokens"
