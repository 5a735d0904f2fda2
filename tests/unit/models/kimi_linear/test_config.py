"""Both spellings give one configuration; whatever would be computed wrongly is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import ConfigError, UnsupportedModel
from sluice.models.config_fields import ConfigFields
from sluice.models.kimi_linear.config import LayerKind, load_config, parse_config
from tests.unit.models.kimi_linear.tiny import PUBLISHED, published, with_linear

KDA, MLA = LayerKind.KDA, LayerKind.MLA
# Kimi-Linear-48B-A3B, the keys that matter.
RELEASED: dict[str, Any] = {
    **PUBLISHED,
    "num_hidden_layers": 27,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [i for i in range(1, 27) if i % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}


def test_layer_lists_are_one_indexed() -> None:
    config = parse_config(published())
    assert config.layer_kinds == (KDA, KDA, MLA, KDA)
    assert config.moe_layers == (False, True, True, True)
    assert config.layers_of(MLA) == (2,)


def test_the_released_pattern() -> None:
    config = parse_config(ConfigFields(RELEASED))
    assert config.layers_of(MLA) == (3, 7, 11, 15, 19, 23, 26)
    assert len(config.layers_of(KDA)) == 20
    assert (config.kda.key_dim, config.kda.value_dim, config.kda.columns) == (128, 128, 3)


def test_the_spelling_that_transformers_saves() -> None:
    raw = dict(PUBLISHED)
    linear = raw.pop("linear_attn_config")
    for gone in ("first_k_dense_replace", "moe_layer_freq", "mla_use_nope"):
        raw.pop(gone)
    raw |= {
        "layer_types": [kind.value for kind in (KDA, KDA, MLA, KDA)],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "linear_head_dim": linear["head_dim"],
        "linear_value_head_dim": linear["value_head_dim"],
        "linear_num_heads": linear["num_heads"],
        "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
    }
    assert parse_config(ConfigFields(raw)) == parse_config(published())
    for theirs, ours in (
        ("num_local_experts", "num_experts"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("n_shared_experts", "num_shared_experts"),
        ("n_group", "num_expert_group"),
        ("norm_topk_prob", "moe_renormalize"),
        ("max_position_embeddings", "model_max_length"),
    ):
        raw[theirs] = raw.pop(ours)
    assert parse_config(ConfigFields(raw)) == parse_config(published())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kda_layers": [1, 2]}, r"no kind for layers \[4\] of 1\.\.4"),
        ({"kda_layers": [0, 1, 3], "full_attn_layers": [2]}, r"names layer 0; .*1\.\.4"),
        ({"kda_layers": [1, 2, 4, 5]}, r"names layer 5; .*1\.\.4"),
        ({"full_attn_layers": [2, 3]}, "full_attn_layers' names layer 2, which is listed already"),
        ({"kda_layers": [1, 2, 2, 4]}, "kda_layers' names layer 2, which is listed already"),
        ({"kda_layers": None}, "linear_attn_config.kda_layers' is missing"),
        ({"kda_layers": [1, 2, 3, 4], "full_attn_layers": []}, "layers of both kinds"),
    ],
)
def test_layer_lists_must_share_out_all_layers(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_config(with_linear(**changes))


def test_there_is_no_default_pattern() -> None:
    """transformers falls back to every fourth layer, which isn't the released one."""
    with pytest.raises(ConfigError, match="no default pattern"):
        parse_config(with_linear(kda_layers=None, full_attn_layers=None))


def test_two_sources_must_agree() -> None:
    kinds = [kind.value for kind in (KDA, KDA, MLA, KDA)]
    assert parse_config(published(layer_types=kinds)) == parse_config(published())
    with pytest.raises(ConfigError, match="disagree"):
        parse_config(published(layer_types=kinds[::-1]))
    with pytest.raises(ConfigError, match="3 items for 4 layers"):
        parse_config(published(layer_types=kinds[:3]))
    with pytest.raises(UnsupportedModel, match="sliding_attention"):
        parse_config(published(layer_types=["sliding_attention", *kinds[1:]]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gate_lower_bound", -5.0),
        ("use_full_rank_gate", True),
        ("attn_res_block_size", 8),
        ("latent_moe_dim", 512),
        ("routed_expert_hidden_size", 1024),
    ],
)
def test_fields_of_kimi_k3_are_refused_by_name(key: str, value: object) -> None:
    for fields, path in ((published(**{key: value}), key), (with_linear(**{key: value}), key)):
        with pytest.raises(UnsupportedModel, match=rf"{path}' is .*Kimi-K3"):
            parse_config(fields)
    parse_config(published(**{key: None}))
    parse_config(published(**{key: False}))


def test_an_unknown_key_of_the_recurrent_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="kernel_variant' is unknown"):
        parse_config(with_linear(kernel_variant=2))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["KimiK3ForCausalLM"]),
        ("model_type", "kimi_k3"),
        ("mla_use_nope", False),
        ("moe_router_activation_func", "softmax"),
        ("q_lora_rank", 64),
        ("rope_scaling", {"type": "yarn"}),
        ("quantization_config", {"quant_method": "fp8"}),
        ("tie_word_embeddings", True),
        ("attention_bias", True),
        ("num_nextn_predict_layers", 1),
        ("mlp_layer_types", ["dense", "hash", "sparse", "sparse"]),
    ],
)
def test_variants_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match=key if key != "architectures" else "KimiK3"):
        parse_config(published(**{key: value}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads must equal"),
        ({"num_expert_group": 3}, "num_experts must divide"),
        ({"num_expert_group": 2, "topk_group": 3}, "topk_group must not exceed"),
        ({"num_expert_group": 8}, "needs two experts"),
        (
            {"num_expert_group": 4, "topk_group": 1, "num_experts_per_token": 3},
            "must fit into the chosen",
        ),
        ({"mlp_layer_types": ["dense"]}, "1 items for 4 layers"),
        ({"moe_renormalize": 1}, "moe_renormalize"),
        ({"first_k_dense_replace": None}, "first_k_dense_replace' is missing"),
        ({"hidden_size": "64"}, "hidden_size"),
    ],
)
def test_inconsistent_values(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_config(published(**changes))


def test_moe_layers_by_frequency() -> None:
    config = parse_config(published(first_k_dense_replace=0, moe_layer_freq=2))
    assert config.moe_layers == (True, False, True, False)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    assert load_config(tmp_path) == parse_config(published())
