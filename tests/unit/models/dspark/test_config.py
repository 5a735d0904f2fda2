"""A DSPARK draft's configuration: every nesting, and every refusal by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.errors import ConfigError, UnsupportedModel
from sluice.models.dspark.config import (
    ConfidenceConfig,
    MarkovKind,
    check_steps,
    load_config,
    parse_config,
)
from tests.unit.models.dspark.tiny import DRAFT_CONFIG

OWN = (
    "block_size",
    "target_layer_ids",
    "num_target_layers",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
)
LAYERS = {key: value for key, value in DRAFT_CONFIG.items() if key not in OWN}
FIELDS = {key: DRAFT_CONFIG[key] for key in OWN}


def _without(*keys: str) -> dict[str, object]:
    return {key: value for key, value in DRAFT_CONFIG.items() if key not in keys}


@pytest.mark.parametrize(
    "raw",
    [
        {**LAYERS, "dspark_config": FIELDS},
        {**LAYERS, "dflash_config": FIELDS},
        {**LAYERS, **{f"dspark_{key}": value for key, value in FIELDS.items()}},
        {**LAYERS, **{f"dflash_{key}": value for key, value in FIELDS.items()}},
        {**LAYERS, "dspark_config": {f"dspark_{key}": value for key, value in FIELDS.items()}},
        {**LAYERS, **FIELDS, "dflash_config": {"mask_token_id": 28, "markov_rank": 5}},
        {**LAYERS, "block_size": 4, "dflash_config": {**FIELDS, "block_size": None}},
    ],
)
def test_every_nesting_means_the_same(raw: dict[str, object]) -> None:
    assert parse_config(raw) == parse_config(DRAFT_CONFIG)


def test_the_published_fields() -> None:
    config = parse_config(DRAFT_CONFIG)
    assert (config.block_size, config.block_rows, config.verify_tokens) == (4, 4, 5)
    assert config.target_layer_ids == (2, 0, 3), "list order is the order of concatenation"
    assert config.markov_kind is MarkovKind.VANILLA
    assert config.confidence is None
    assert config.sample_from_anchor
    assert not config.is_causal
    assert config.target_hidden_size == config.layers.hidden_size == 20
    assert config.layers.qk_norm


def test_a_block_that_does_not_sample_from_its_anchor_has_one_more_row() -> None:
    config = parse_config({**DRAFT_CONFIG, "sample_from_anchor": False})
    assert (config.block_size, config.block_rows) == (4, 5)


@pytest.mark.parametrize(
    ("layers", "drafts", "ids"),
    [(36, 5, (1, 9, 17, 25, 33)), (27, 5, (1, 7, 12, 18, 24)), (8, 2, (1, 5)), (9, 1, (4,))],
)
def test_missing_target_layers_are_spread_evenly(
    layers: int, drafts: int, ids: tuple[int, ...]
) -> None:
    raw = {**_without("target_layer_ids"), "num_target_layers": layers, "num_hidden_layers": drafts}
    assert parse_config(raw).target_layer_ids == ids


def test_the_confidence_head() -> None:
    raw = {**DRAFT_CONFIG, "enable_confidence_head": True, "confidence_head_with_markov": True}
    assert parse_config(raw).confidence == ConfidenceConfig(True, (1.0,) * 4)
    raw["confidence_temperatures"] = [1, 2.5, 3, 4]
    assert parse_config(raw).confidence == ConfidenceConfig(True, (1.0, 2.5, 3.0, 4.0))


@pytest.mark.parametrize("value", [[1.0] * 3, [1.0, 1.0, 0.0, 1.0], "1", [True] * 4])
def test_temperatures_that_do_not_fit_the_block_are_refused(value: object) -> None:
    raw = {**DRAFT_CONFIG, "enable_confidence_head": True, "confidence_temperatures": value}
    with pytest.raises(ConfigError, match=r"confidence_temperatures.*4 positive numbers"):
        parse_config(raw)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"dspark_config": {"block_size": 7}},
            r"'block_size' and 'dspark_config.block_size' differ",
        ),
        (
            {"dspark_mask_token_id": 3},
            "'mask_token_id' and 'dspark_mask_token_id' differ: 28 and 3",
        ),
        ({"block_size": 0}, "'block_size' is 0, expected at least 1"),
        ({"block_size": "4"}, "'block_size' is '4', expected an integer"),
        ({"mask_token_id": 29}, "'mask_token_id' is 29, vocab_size 29"),
        ({"target_layer_ids": []}, "'target_layer_ids' is \\[\\]"),
        ({"target_layer_ids": [0, 4]}, r"'target_layer_ids' is \[0, 4\].*0 \.\. 3"),
        ({"target_layer_ids": [-1, 2]}, r"'target_layer_ids' is \[-1, 2\]"),
        ({"target_layer_ids": [1, 1]}, r"'target_layer_ids' is \[1, 1\], expected different"),
        ({"num_draft_tokens": 4}, "'num_draft_tokens' is 4, but a block_size of 4 means 5"),
        ({"dspark_config": [1]}, "'dspark_config' is .*expected an object"),
    ],
)
def test_broken_configs_are_refused_by_key(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({**DRAFT_CONFIG, **change})


@pytest.mark.parametrize("key", OWN[:1] + OWN[2:5])
def test_missing_keys_are_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' is missing"):
        parse_config(_without(key))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "DeepseekV4ForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"model_type": "gemma4_text"}, "'model_type' is 'gemma4_text'"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type"),
        ({"speculators_config": {"algorithm": "dspark"}}, "packaged by Speculators"),
        ({"markov_rank": 0}, "'markov_rank' is 0.*DFlash"),
        ({"markov_head_type": "fir"}, "'markov_head_type' is 'fir'; known"),
        ({"draft_vocab_size": 12}, "'draft_vocab_size' is 12, 'vocab_size' 29"),
        ({"enable_qwen35_gated_q_proj": True}, "enable_qwen35_gated_q_proj"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_variants_are_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        parse_config({**DRAFT_CONFIG, **change})


@pytest.mark.parametrize("steps", [1, 3, 5, 7])
def test_steps_other_than_the_block_are_refused_not_clamped(steps: int) -> None:
    config = parse_config(DRAFT_CONFIG)
    check_steps(config, 4)
    with pytest.raises(ConfigError, match=rf"{steps} steps .*block_size is 4 \(5 tokens"):
        check_steps(config, steps)


def test_a_folder_without_a_draft_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read the draft's config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a list"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(DRAFT_CONFIG))
    assert load_config(tmp_path) == parse_config(DRAFT_CONFIG)
