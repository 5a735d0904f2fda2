"""The state spec: its name, row shape and shard axis are what the wire and the pools rely on."""

from __future__ import annotations

import pytest

from sluice.config import PoolConfig, PoolMode
from sluice.errors import ConfigError
from sluice.layout.component import Coverage, Kind, Space
from sluice.models.config_fields import ConfigFields
from sluice.models.llama.config import parse_config
from sluice.models.llama.state import target_state
from sluice.pools.memory import build_memory
from tests.unit.models.llama.test_config import LLAMA_32, QWEN3


def test_one_row_a_token_with_heads_first() -> None:
    (spec,) = target_state(parse_config(ConfigFields(LLAMA_32)), "bfloat16")
    assert (spec.name, spec.kind, spec.coverage) == ("target.kv", Kind.KV, Coverage.HISTORY)
    assert (spec.tokens_per_row, spec.window_tokens) == (1, 0)
    assert (spec.row_shape, spec.shard_axis) == ((8, 2, 64), 0)
    assert spec.layer_ids == tuple(range(16))


@pytest.mark.parametrize("mode", list(PoolMode), ids=lambda mode: mode.value)
def test_both_pool_modes_keep_it_in_pages(mode: PoolMode) -> None:
    needs = target_state(parse_config(ConfigFields(QWEN3)), "bfloat16")
    memory = build_memory(needs, PoolConfig(mode=mode, page_tokens=16, num_pages=2), 4)
    (component,) = memory.components()
    assert (component.space, component.rows_per_item) == (Space.PAGE, 16)
    # Keys and values of 8 heads of 128, 2 bytes each, 28 layers.
    assert component.bytes_per_row == 28 * 2 * 8 * 128 * 2
    assert all(entry.shard_axis == 0 for entry in component.entries)


def test_unknown_row_dtype_is_refused() -> None:
    config = parse_config(ConfigFields(QWEN3))
    with pytest.raises(ConfigError, match=r"'float8_e4m3fn'.*Qwen3ForCausalLM.*bfloat16"):
        target_state(config, "float8_e4m3fn")
