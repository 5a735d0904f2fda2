"""Which families keep mxfp8 history, of which state, and who is refused by name before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sluice.config import EngineConfig, PoolConfig, SpecConfig
from sluice.engine.build import build_engine
from sluice.errors import ConfigError, GeometryError
from sluice.layout.component import Kind
from sluice.models.config_fields import ConfigFields
from sluice.models.deepseek_v4 import state as deepseek_v4
from sluice.models.deepseek_v4.config import load_config
from sluice.models.dspark import state as dspark
from sluice.models.dspark.config import parse_config as parse_dspark
from sluice.models.inventory import read_config_file
from sluice.models.kimi_linear.config import MlaShape
from sluice.models.kimi_linear.config import parse_config as parse_kimi
from sluice.models.kimi_linear.state import target_state as kimi_state
from sluice.models.llama.config import parse_config as parse_llama
from sluice.models.llama.state import target_state as llama_state
from sluice.pools.base import BufferSpec
from sluice.types import Role
from tests.unit.models.dspark.tiny import DRAFT_CONFIG
from tests.unit.models.kimi_linear.tiny import published
from tests.unit.models.llama.test_config import LLAMA_32

TESTS = Path(__file__).parents[2]
TINY_DSV4 = TESTS.parent / "models" / "tiny-dsv4"
CONFIGS = TESTS / "data" / "configs"


def formats(specs: tuple[BufferSpec, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(spec.name, spec.dtype, spec.row_shape) for spec in specs]


def test_llama_scales_runs_of_a_head() -> None:
    specs = llama_state(parse_llama(ConfigFields(LLAMA_32)), "mxfp8")
    assert formats(specs) == [
        ("target.kv", "float8_e4m3fn", (8, 2, 64)),
        ("target.kv.scale", "float8_e8m0fnu", (8, 2, 2)),
    ]
    assert [(spec.kind, spec.shard_axis) for spec in specs] == [(Kind.KV, 0), (Kind.BLOCK_SCALE, 0)]


def test_kimi_scales_latents_and_nothing_that_accumulates() -> None:
    config = parse_kimi(published(kv_lora_rank=64, qk_rope_head_dim=32))
    assert formats(kimi_state(config, "mxfp8"))[:2] == [
        ("target.mla", "float8_e4m3fn", (96,)),
        ("target.mla.scale", "float8_e8m0fnu", (3,)),
    ]
    slots = [(spec.name, spec.dtype) for spec in kimi_state(config, "mxfp8")[2:]]
    assert slots == [
        ("kda.conv", "float32"),
        ("kda.recurrent", "float32"),
        ("kda.length", "int64"),
    ]


def test_a_dspark_draft_scales_its_context_too() -> None:
    specs = dspark.draft_state(parse_dspark({**DRAFT_CONFIG, "head_dim": 32}), "mxfp8")
    assert formats(specs) == [
        ("draft.kv", "float8_e4m3fn", (2, 2, 32)),
        ("draft.kv.scale", "float8_e8m0fnu", (2, 2, 1)),
    ]


def test_the_published_kimi_linear_keeps_the_published_bytes_a_token() -> None:
    """Reference: 4032 bytes a token of 8-bit latents; a scale for every 32 of them comes on top."""
    needs = read_config_file(CONFIGS / "kimi-linear-48b-a3b.json").state_needs("mxfp8").target
    values, scales = (len(spec.layer_ids) * spec.row_shape[0] for spec in needs[:2])
    assert (values, scales) == (4032, 4032 // 32)


def test_heads_of_other_widths_are_refused() -> None:
    llama = replace(parse_llama(ConfigFields(LLAMA_32)), head_dim=80)
    with pytest.raises(
        GeometryError, match=r"target.kv.*every 32 values.*8x2x80.*multiple of 32"
    ) as e:
        llama_state(llama, "mxfp8")
    assert "use bfloat16" in e.value.remedy
    with pytest.raises(GeometryError, match=r"draft.kv.*2x2x6"):
        dspark.draft_state(parse_dspark(DRAFT_CONFIG), "mxfp8")


def test_a_block_never_spans_latent_and_shared_key_part() -> None:
    """Their sum would divide: 48 + 16 = 64."""
    config = parse_kimi(published())
    odd = replace(config, mla=MlaShape(4, latent_dim=48, shared_dim=16, nope_dim=16, value_dim=16))
    with pytest.raises(GeometryError, match=r"target.mla.*48 \+ 16.*48 isn't a multiple of 32"):
        kimi_state(odd, "mxfp8")


def test_deepseek_v4_is_refused_by_name() -> None:
    config = load_config(TINY_DSV4)
    for needs in (deepseek_v4.target_state, deepseek_v4.draft_state):
        with pytest.raises(ConfigError, match="'mxfp8' is not supported by DeepSeek-V4"):
            needs(config, "mxfp8")


def test_a_deepseek_v4_pod_does_not_start() -> None:
    pool = PoolConfig(num_pages=2, num_slots=1, num_window_pages=2, kv_dtype="mxfp8")
    with pytest.raises(ConfigError, match="'mxfp8' is not supported by DeepSeek-V4"):
        build_engine(TINY_DSV4, Role.DECODE, pool, SpecConfig(), EngineConfig())
