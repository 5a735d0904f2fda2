"""Both spellings of a DeepSeek-V4 config give one meaning; look-alikes are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.errors import ConfigError, UnsupportedModel
from sluice.models.config_fields import ConfigFields
from sluice.models.deepseek_v4.config import (
    DeepseekV4Config,
    LayerKind,
    load_config,
    parse_config,
)
from sluice.models.layers.rope import RopeParams
from tests.parity.deepseek_v4_oracle import TINY, tiny_config

# The published Flash values (as a third-party copy of its config.json has them).
FLASH: dict[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def _parse(raw: dict[str, object]) -> DeepseekV4Config:
    return parse_config(ConfigFields(raw))


def test_published_flash() -> None:
    config = _parse(FLASH)
    assert config.num_layers == 43
    counts = [len(config.layers_of(kind)) for kind in LayerKind]
    assert counts == [2, 21, 20]
    assert sum(config.hash_layers) == 3
    assert config.hash_layers[2]
    assert config.compress_rope == RopeParams(64, 160000.0, 16.0, 65536, 32.0, 1.0)
    assert config.main_rope == RopeParams(64, 10000.0)
    assert [config.ratio(i) for i in (0, 2, 3)] == [0, 4, 128]
    assert config.rope_of(LayerKind.WINDOW) is config.main_rope
    assert config.rope_of(LayerKind.HCA) is config.compress_rope


def test_saved_by_transformers_means_the_same(tmp_path: Path) -> None:
    tiny_config("flash").save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "compress_ratios" not in saved
    assert load_config(tmp_path) == _parse(TINY)


def test_custom_hca_ratio(tmp_path: Path) -> None:
    tiny_config("short_hca").save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert config.hca_ratio == 16
    assert [config.ratio(layer) for layer in range(4)] == [16, 4, 0, 16]
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
    published = {**TINY, "compress_ratios": [0, 4, 16, 4, 0], "compress_rates": rates}
    assert _parse(published).hca_ratio == 16


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dspark_num_layers": 3}, "dspark_num_layers.*DSpark"),
        ({"engram_layers": [1]}, r"engram_layers.*V4\.1"),
        ({"compress_ratios": [0, 0] + [1, 2] * 21}, r"compress_ratios.*1.*V4\.1"),
        ({"compress_ratios": [0, 0] + [4, 16] * 21}, "compress_ratios.*16"),
        ({"compress_ratios": FLASH["compress_ratios"] + [4]}, r"compress_ratios\[44\] is 4"),  # type: ignore[operator]
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM"),
        ({"model_type": "deepseek_v41"}, "deepseek_v41"),
        ({"scoring_func": "sigmoid"}, "scoring_func.*sigmoid"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"num_nextn_predict_layers": 3}, "num_nextn_predict_layers"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method.*awq"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"layer_types": ["linear_attention"] * 43}, "linear_attention"),
        ({"mlp_layer_types": ["dense"] * 43}, "dense"),
    ],
)
def test_variants_are_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        _parse({**FLASH, **change})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"compress_ratios": [0, 4]}, "compress_ratios has 2 items for 43 layers"),
        ({"layer_types": ["sliding_attention"]}, "layer_types has 1 items"),
        ({"mlp_layer_types": ["moe"]}, "mlp_layer_types has 1 items"),
        ({"num_hash_layers": None}, "num_hash_layers.*missing"),
        ({"o_groups": 7}, "o_groups"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok"),
        ({"qk_rope_head_dim": 256}, "index_head_dim"),
        ({"hidden_size": "wide"}, "hidden_size.*'wide'"),
    ],
)
def test_broken_configs_are_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _parse({**FLASH, **change})


def test_trailing_zero_ratios_are_draft_layers() -> None:
    ratios = [*FLASH["compress_ratios"], 0, 0]  # type: ignore[misc]
    assert _parse({**FLASH, "compress_ratios": ratios}) == _parse(FLASH)


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="list"):
        load_config(tmp_path)
