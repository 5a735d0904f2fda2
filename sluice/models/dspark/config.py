"""Configuration of a DSPARK draft, parsed from its ``config.json`` in any of the known nestings.

A draft's own fields stand at the top level, with a prefix (``dspark_block_size``), or in a section
(``dspark_config``, ``dflash_config``). A field may be repeated as long as all places agree. The draft's
layers are Qwen3's, and their fields are at the top level.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from sluice.errors import ConfigError, UnsupportedModel
from sluice.models.config_fields import ConfigFields
from sluice.models.llama.config import QWEN3, LlamaConfig
from sluice.models.llama.config import parse_config as parse_layers

ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
_SECTIONS = ("dspark_config", "dflash_config")
_PREFIXES = ("dspark_", "dflash_")
_FIELDS = (
    "block_size",
    "num_draft_tokens",
    "target_layer_ids",
    "num_target_layers",
    "target_hidden_size",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "confidence_temperatures",
    "sample_from_anchor",
    "is_causal",
)


class MarkovKind(Enum):
    """How the previous token corrects a position's logits (values: config.json's names)."""

    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


@dataclass(frozen=True)
class ConfidenceConfig:
    """The head that guesses whether a draft will stand. One temperature a block position."""

    with_markov: bool
    temperatures: tuple[float, ...]


@dataclass(frozen=True)
class DSparkConfig:
    """``layers``: the draft's own Qwen3 layers. Lengths in tokens; ``target_layer_ids`` are 0-based.

    ``sample_from_anchor``: row j of the block guesses the token after it, so that a block of
    ``block_size`` rows gives as many drafts; otherwise row j guesses its own token, and there is one
    more row, whose answer (the anchor, which is known) is dropped.
    """

    layers: LlamaConfig
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    target_hidden_size: int
    mask_token_id: int
    markov_rank: int
    markov_kind: MarkovKind
    confidence: ConfidenceConfig | None
    sample_from_anchor: bool
    is_causal: bool

    @property
    def block_rows(self) -> int:
        """Rows of one block's forward."""
        return self.block_size if self.sample_from_anchor else self.block_size + 1

    @property
    def verify_tokens(self) -> int:
        """The anchor and its drafts."""
        return self.block_size + 1


def load_config(folder: Path) -> DSparkConfig:
    """Parse ``folder/config.json``. Raises ConfigError (broken) or UnsupportedModel (a variant)."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"can't read the draft's {path.name} in {folder.name!r}: {error}",
            stage="load",
            remedy="name a folder with a DSPARK draft",
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path.name} holds a {type(raw).__name__}, not an object", stage="load")
    return parse_config(raw)


def parse_config(raw: Mapping[str, object]) -> DSparkConfig:
    """The typed configuration of a raw ``config.json``; see ``load_config`` for errors."""
    _refuse_variants(ConfigFields(raw))
    fields = ConfigFields(_flattened(raw))
    layers = parse_layers(ConfigFields({**raw, "architectures": [QWEN3], "model_type": "qwen3"}))
    block_size = fields.integer("block_size", at_least=1)
    num_target_layers = fields.integer("num_target_layers", at_least=1)
    config = DSparkConfig(
        layers=layers,
        block_size=block_size,
        target_layer_ids=_target_layer_ids(fields, num_target_layers, layers.num_layers),
        num_target_layers=num_target_layers,
        target_hidden_size=fields.integer("target_hidden_size", layers.hidden_size, at_least=1),
        mask_token_id=fields.integer("mask_token_id", at_least=0),
        markov_rank=fields.integer("markov_rank", at_least=0),
        markov_kind=_markov_kind(fields),
        confidence=_confidence(fields, block_size),
        sample_from_anchor=fields.boolean("sample_from_anchor", True),
        is_causal=fields.boolean("is_causal", False),
    )
    _check(config, fields)
    return config


def check_steps(config: DSparkConfig, steps: int) -> None:
    """Raise ConfigError unless ``steps`` drafts a step is what the draft's block gives."""
    if steps != config.block_size:
        raise ConfigError(
            f"speculation of {steps} steps ({steps + 1} tokens verified), but the draft's block_size is "
            f"{config.block_size} ({config.verify_tokens} tokens verified)",
            stage="start",
            remedy=f"set the steps to {config.block_size}, or to 0 to run without a draft",
        )


def _places(raw: Mapping[str, object], field: str) -> Iterator[tuple[str, object]]:
    """Every stated (place, value) of a field."""
    for name in (field, *(prefix + field for prefix in _PREFIXES)):
        if raw.get(name) is not None:
            yield name, raw[name]
    for section in _SECTIONS:
        nested = ConfigFields(raw).section(section)
        for name in (field, *(prefix + field for prefix in _PREFIXES)):
            if nested is not None and nested.has(name):
                yield f"{section}.{name}", nested.get(name)


def _flattened(raw: Mapping[str, object]) -> dict[str, object]:
    """The draft's fields by their plain names. Raises ConfigError where two places differ."""
    flat: dict[str, object] = {}
    for field in _FIELDS:
        stated = list(_places(raw, field))
        for place, value in stated[1:]:
            if value != stated[0][1]:
                raise ConfigError(
                    f"config keys {stated[0][0]!r} and {place!r} differ: {stated[0][1]!r} and {value!r}",
                    stage="load",
                    remedy="keep one of them",
                )
        if stated:
            flat[field] = stated[0][1]
    return flat


def _refuse_variants(fields: ConfigFields) -> None:
    for key in ("speculators_config", "speculators_model_type", "transformer_layer_config"):
        if fields.has(key):
            raise UnsupportedModel(
                f"config key {key!r} marks a draft packaged by Speculators, which isn't supported",
                stage="load",
                remedy="use the draft as DeepSpec saves it",
            )
    names = fields.strings("architectures", ())
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise UnsupportedModel(
            f"config key 'architectures' is {list(names)}; drafts are one of {list(ARCHITECTURES)}",
            stage="load",
        )
    if fields.get("model_type", "qwen3") != "qwen3":
        raise UnsupportedModel(
            f"config key 'model_type' is {fields.get('model_type')!r}; only drafts with Qwen3 layers "
            "('qwen3') are supported",
            stage="load",
        )
    for key in ("enable_qwen35_gated_q_proj", "dspark_backbone_conv_enabled", "shift_label"):
        if fields.get(key, False):
            raise UnsupportedModel(f"config key {key!r} is not supported", stage="load")
    vocab = fields.get("vocab_size")
    if fields.get("draft_vocab_size", vocab) != vocab:
        raise UnsupportedModel(
            f"config key 'draft_vocab_size' is {fields.get('draft_vocab_size')!r}, 'vocab_size' "
            f"{vocab!r}; a draft shares its target's vocabulary",
            stage="load",
        )


def _target_layer_ids(fields: ConfigFields, num_target_layers: int, count: int) -> tuple[int, ...]:
    """The stated ids, else ``count`` of them spread evenly from layer 1 to layer L - 3 (DFlash)."""
    if fields.has("target_layer_ids"):
        return fields.integers("target_layer_ids")
    if count == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


def _markov_kind(fields: ConfigFields) -> MarkovKind:
    name = fields.get("markov_head_type", MarkovKind.VANILLA.value)
    known = {kind.value: kind for kind in MarkovKind}
    if not isinstance(name, str) or name.lower() not in known:
        raise UnsupportedModel(
            f"config key 'markov_head_type' is {name!r}; known: {sorted(known)}", stage="load"
        )
    return known[name.lower()]


def _confidence(fields: ConfigFields, block_size: int) -> ConfidenceConfig | None:
    if not fields.boolean("enable_confidence_head", False):
        return None
    value = fields.get("confidence_temperatures", [1.0] * block_size)
    numbers = isinstance(value, list) and all(type(item) in (int, float) for item in value)
    if not isinstance(value, list) or not numbers or len(value) != block_size or min(value) <= 0:
        raise ConfigError(
            f"config key 'confidence_temperatures' is {value!r}, expected {block_size} positive "
            "numbers, one a block position",
            stage="load",
        )
    return ConfidenceConfig(
        with_markov=fields.boolean("confidence_head_with_markov", False),
        temperatures=tuple(float(item) for item in value),
    )


def _check(config: DSparkConfig, fields: ConfigFields) -> None:
    ids, count = config.target_layer_ids, config.num_target_layers
    if config.markov_rank == 0:
        raise UnsupportedModel(
            "config key 'markov_rank' is 0: a draft without a Markov head is DFlash, not DSPARK",
            stage="load",
        )
    if not ids or len(set(ids)) != len(ids) or not all(0 <= layer < count for layer in ids):
        raise ConfigError(
            f"config key 'target_layer_ids' is {list(ids)}, expected different layers of a target "
            f"with {count} (0 .. {count - 1})",
            stage="load",
        )
    if config.mask_token_id >= config.layers.vocab_size:
        raise ConfigError(
            f"config key 'mask_token_id' is {config.mask_token_id}, vocab_size {config.layers.vocab_size}",
            stage="load",
            remedy="name a token that has an embedding",
        )
    stated = fields.integer("num_draft_tokens", config.verify_tokens)
    if stated != config.verify_tokens:
        raise ConfigError(
            f"config key 'num_draft_tokens' is {stated}, but a block_size of {config.block_size} "
            f"means {config.verify_tokens}",
            stage="load",
        )
