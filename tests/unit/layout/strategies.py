"""Arbitrary layouts, well built or not: whatever can be written must be read back equal."""

from __future__ import annotations

from hypothesis import strategies as st

from sluice.layout.component import Component, Coverage, Entry, Kind, Owner, Space
from sluice.layout.layout import Geometry, Layout, ModelIdentity, Parallelism, SpecIdentity

text = st.text(max_size=8)
small = st.integers(0, 2**32 - 1)
large = st.integers(0, 2**63)
numbers = st.lists(small, max_size=4).map(tuple)

entries = st.builds(
    Entry,
    layer_id=small,
    dtype=text,
    row_shape=st.lists(large, max_size=3).map(tuple),
    row_bytes=large,
    shard_axis=st.none() | small,
    shards=small,
)
components = st.builds(
    Component,
    name=text,
    owner=st.sampled_from(Owner),
    kind=st.sampled_from(Kind),
    space=st.sampled_from(Space),
    coverage=st.sampled_from(Coverage),
    tokens_per_row=small,
    rows_per_item=small,
    window_tokens=small,
    num_items=large,
    entries=st.lists(entries, max_size=2).map(tuple),
    interleave=small,
)
layouts = st.builds(
    Layout,
    role=text,
    model=st.builds(ModelIdentity, text, text, text, text),
    geometry=st.builds(Geometry, small, small, numbers, text, small, text, text),
    parallelism=st.builds(Parallelism, small, small, small),
    spec=st.builds(SpecIdentity, text, small, small, text, numbers),
    components=st.lists(components, max_size=2).map(tuple),
    wire_version=small,
)
