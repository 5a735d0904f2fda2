"""The state specs: what the wire and the pools rely on, and the published model's sizes."""

from __future__ import annotations

import dataclasses
import math

import pytest

from sluice.config import PoolConfig, PoolMode
from sluice.errors import ConfigError
from sluice.layout.component import Coverage, Kind, Space
from sluice.models.kimi_linear.config import KdaShape, LayerKind, MlaShape, parse_config
from sluice.models.kimi_linear.state import target_state
from sluice.pools.memory import build_memory
from sluice.types import RequestId
from tests.unit.models.kimi_linear.tiny import published

CONFIG = parse_config(published())


def test_state_in_wire_order() -> None:
    found = [
        (s.name, s.layer_ids, s.row_shape, s.dtype, s.shard_axis)
        for s in target_state(CONFIG, "bfloat16")
    ]
    assert found == [
        ("target.mla", (2,), (24,), "bfloat16", None),
        ("kda.conv", (0, 1, 3), (2, 3, 64), "bfloat16", 0),
        ("kda.recurrent", (0, 1, 3), (2, 16, 32), "float32", 0),
        ("kda.length", (0,), (1,), "int64", None),
    ]


def test_kinds_say_what_the_bytes_mean() -> None:
    kinds = [(s.kind, s.coverage) for s in target_state(CONFIG, "float32")]
    assert kinds == [
        (Kind.KV, Coverage.HISTORY),
        (Kind.KDA_CONV, Coverage.LAST),
        (Kind.KDA_RECURRENT, Coverage.LAST),
        (Kind.STATE_LENGTH, Coverage.LAST),
    ]
    assert "KEYS_VALUES" in Kind.KDA_RECURRENT.value  # square states can't tell by their shape


def test_sizes_of_the_published_model() -> None:
    """Reference: 41.4 MiB a request beside 8064 bytes a token, in bfloat16."""
    config = dataclasses.replace(
        CONFIG,
        layer_kinds=(*([LayerKind.KDA] * 20), *([LayerKind.MLA] * 7)),
        kda=KdaShape(num_heads=32, key_dim=128, value_dim=128, conv_width=4),
        mla=MlaShape(num_heads=32, latent_dim=512, shared_dim=64, nope_dim=128, value_dim=128),
    )
    size = {"bfloat16": 2, "float32": 4, "int64": 8}
    mla, conv, recurrent, length = (
        math.prod(s.row_shape) * size[s.dtype] * len(s.layer_ids)
        for s in target_state(config, "bfloat16")
    )
    assert mla == 8064
    assert conv == 20 * 72 * 1024
    assert recurrent == 20 * 2 * 1024 * 1024
    assert length == 8


@pytest.mark.parametrize("mode", list(PoolMode))
def test_pools_put_it_into_pages_and_request_slots(mode: PoolMode) -> None:
    config = PoolConfig(mode=mode, page_tokens=16, num_pages=4, num_slots=2)
    memory = build_memory(target_state(CONFIG, "float32"), config, 4)
    spaces = {c.name: (c.space, c.rows_per_item) for c in memory.components()}
    assert spaces == {
        "target.mla": (Space.PAGE, 16),
        "kda.conv": (Space.REQUEST_SLOT, 1),
        "kda.recurrent": (Space.REQUEST_SLOT, 1),
        "kda.length": (Space.REQUEST_SLOT, 1),
    }
    entries = memory.component("kda.recurrent").entries
    assert [entry.shard_axis for entry in entries] == [0, 0, 0]


def test_a_recycled_slot_is_cleared_before_anybody_learns_its_address() -> None:
    config = PoolConfig(page_tokens=16, num_pages=4, num_slots=1)
    memory = build_memory(target_state(CONFIG, "float32"), config, 1)
    names = ("kda.conv", "kda.recurrent", "kda.length")
    first = memory.open(RequestId("first"), 16)
    buffers = [memory.buffer(name, 0) for name in names]
    for buffer in buffers:
        buffer[first.slot] = 7
    memory.close(first)
    second = memory.open(RequestId("second"), 16)
    assert all(not buffer[second.slot].any() for buffer in buffers)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8", "bf16"])
def test_other_row_types_are_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match=dtype):
        target_state(CONFIG, dtype)
