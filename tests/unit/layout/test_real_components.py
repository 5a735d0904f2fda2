"""The components that model and pools really declare: same as the examples, rules kept, bytes right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.config import PoolConfig, PoolMode
from sluice.layout.component import Component
from sluice.layout.consistency import check_layout
from sluice.models.config_fields import ConfigFields
from sluice.models.deepseek_v4.config import parse_config
from sluice.models.deepseek_v4.state import draft_state, target_state
from sluice.pools.specs import components_of
from tests.unit.layout.example_layouts import FLASH, PRO, Dims, Pod, layout_of


def config_of(dims: Dims) -> ConfigFields:
    """What state depends on, as published; the rest as small as the parser allows."""
    return ConfigFields(
        {
            "model_type": "deepseek_v4",
            "num_hidden_layers": len(dims.ratios),
            "compress_ratios": [*dims.ratios, 0],
            "num_nextn_predict_layers": 1,
            "hidden_size": dims.hidden,
            "head_dim": dims.latent,
            "qk_rope_head_dim": 64,
            "index_head_dim": dims.index,
            "sliding_window": dims.window,
            "hc_mult": dims.streams,
            "vocab_size": 129280,
            "num_attention_heads": 64,
            "q_lora_rank": 1024,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "index_n_heads": 64,
            "index_topk": 512,
            "n_routed_experts": 256,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 2048,
            "num_hash_layers": 3,
            "swiglu_limit": 10.0,
            "eos_token_id": 1,
            "rope_theta": 10000,
            "compress_rope_theta": 160000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 16,
                "original_max_position_embeddings": 65536,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        }
    )


def built(dims: Dims, pod: Pod) -> tuple[Component, ...]:
    config = parse_config(config_of(dims))
    needs = (*target_state(config, pod.kv_dtype), *draft_state(config, pod.kv_dtype))
    pool = PoolConfig(
        mode=PoolMode(pod.mode),
        page_tokens=pod.page_tokens,
        num_pages=pod.num_pages - 1,
        num_window_pages=pod.num_window_pages - 1,
        num_slots=pod.num_slots - 1,
        kv_dtype=pod.kv_dtype,
    )
    return components_of(needs, pool, pod.steps + 1)


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("mode", ["paged", "unified"])
@pytest.mark.parametrize("dims", [FLASH, PRO])
def test_the_examples_are_what_pods_really_build(dims: Dims, mode: str, steps: int) -> None:
    pod = Pod(mode=mode, steps=steps, kv_dtype="bfloat16")
    layout = replace(layout_of(dims, pod), components=built(dims, pod))
    check_layout(layout)
    for real, example in zip(layout.components, layout_of(dims, pod).components, strict=True):
        entries = real.entries
        if real.name.startswith("draft."):  # the draft's layer is numbered after the target's
            entries = tuple(replace(entry, layer_id=0) for entry in entries)
        assert replace(real, entries=entries) == example
