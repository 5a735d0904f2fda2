"""Configurations of published Llama and Qwen3 checkpoints, and every look-alike refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.errors import ConfigError, UnsupportedModel
from sluice.models.config_fields import ConfigFields
from sluice.models.llama.config import LlamaConfig, load_config, parse_config
from sluice.models.llama.rope import RopeKind, RopeParams

# As published with Llama-3.2-1B and Qwen3-0.6B, without the keys that nothing here reads.
LLAMA_32 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def _parse(base: dict[str, object], **changes: object) -> LlamaConfig:
    return parse_config(ConfigFields({**base, **changes}))


def test_llama_as_published() -> None:
    config = _parse(LLAMA_32)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 64)
    assert config.group_size == 4
    assert config.rope == RopeParams(64, 500000.0, RopeKind.LLAMA3, 32.0, 8192, 1.0, 4.0)
    assert (config.qk_norm, config.attention_bias, config.tied_embeddings) == (False, False, True)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.max_position_tokens == 131072


def test_qwen3_as_published() -> None:
    config = _parse(QWEN3)
    assert config.qk_norm
    assert config.head_dim == 128  # not hidden_size / num_attention_heads
    assert config.rope == RopeParams(128, 1e6)
    assert config.eos_token_ids == (151645,)


def test_rope_spellings_mean_the_same() -> None:
    nested = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}
    expected = RopeParams(64, 5e4, RopeKind.LINEAR, 2.0)
    assert _parse(LLAMA_32, rope_parameters=nested).rope == expected
    oldest = {"type": "linear", "factor": 2.0}
    assert _parse(LLAMA_32, rope_scaling=oldest, rope_theta=5e4).rope == expected


@pytest.mark.parametrize("base", [LLAMA_32, QWEN3], ids=["llama", "qwen3"])
def test_defaults_of_absent_keys(base: dict[str, object]) -> None:
    absent = ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "eos_token_id")
    config = _parse({key: value for key, value in base.items() if key not in absent})
    assert config.num_kv_heads == config.num_heads
    assert config.head_dim == {"llama": 64, "qwen3": 128}[str(base["model_type"])]
    assert config.rope == RopeParams(config.head_dim, 10000.0)
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"architectures": ["LlamaForCausalLM", "X"]}, "architectures"),
        ({"model_type": "qwen3"}, "'model_type' is 'qwen3'"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"mlp_bias": True}, "'mlp_bias'"),
        ({"pretraining_tp": 2}, "'pretraining_tp'"),
        ({"use_sliding_window": True}, "'use_sliding_window'"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'quantization_config'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "'partial_rotary_factor'"),
    ],
)
def test_variants_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        _parse(LLAMA_32, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_key_value_heads": 5}, "must divide by num_key_value_heads"),
        ({"head_dim": 63}, "head_dim must be even"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' is 1, expected true or false"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"'rope_scaling\.factor' is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "'factor' is 0.5"),
        (
            {"rope_scaling": LLAMA_32["rope_scaling"] | {"low_freq_factor": 4.0}},  # type: ignore[operator]
            "'low_freq_factor' 4.0 must be below",
        ),
    ],
)
def test_broken_configs_name_the_key(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _parse(LLAMA_32, **change)


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert load_config(tmp_path).eos_token_ids == (151645,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [151645, 151643]}')
    assert load_config(tmp_path).eos_token_ids == (151645, 151643)


def test_unreadable_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a list"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"can't read config\.json"):
        load_config(tmp_path)
