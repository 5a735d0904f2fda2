"""Configuration of a Llama or Qwen3 checkpoint, parsed from its ``config.json``.

Two spellings are read: the published one (``rope_theta``, ``rope_scaling``) and the one transformers
saves (``rope_parameters``). Variants that only look alike are refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from sluice.errors import ConfigError, UnsupportedModel
from sluice.models.config_fields import ConfigFields
from sluice.models.llama.rope import RopeKind, RopeParams
from sluice.parallel.cut import share

LLAMA = "LlamaForCausalLM"
QWEN3 = "Qwen3ForCausalLM"


@dataclass(frozen=True)
class _Family:
    """What an architecture's name alone settles, and defaults of keys that config.json may lack."""

    model_type: str
    qk_norm: bool
    head_dim: int | None  # None: hidden_size / num_attention_heads
    max_position_tokens: int


_FAMILIES = {
    LLAMA: _Family("llama", qk_norm=False, head_dim=None, max_position_tokens=2048),
    QWEN3: _Family("qwen3", qk_norm=True, head_dim=128, max_position_tokens=32768),
}


@dataclass(frozen=True)
class LlamaConfig:
    """Everything the forward pass needs to know. Widths in values, lengths in tokens.

    ``qk_norm``: queries and keys are RMS-normed per head before rope (Qwen3).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_tokens: int
    norm_eps: float
    rope: RopeParams
    qk_norm: bool
    attention_bias: bool
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def of_rank(self, ranks: int) -> LlamaConfig:
        """What one of ``ranks`` computes: its heads and MLP width. With fewer key/value heads than ranks,
        neighbours hold the same one. Raises ConfigError where the ranks can't share equally.
        """
        if ranks == 1:
            return self
        if self.num_kv_heads < ranks:
            share("tensor-parallel width", ranks, self.num_kv_heads)
        return replace(
            self,
            num_heads=share("num_attention_heads", self.num_heads, ranks),
            num_kv_heads=share(
                "num_key_value_heads", self.num_kv_heads, min(ranks, self.num_kv_heads)
            ),
            intermediate_size=share("intermediate_size", self.intermediate_size, ranks),
        )


def load_config(folder: Path) -> LlamaConfig:
    """Parse ``folder/config.json``. Raises ConfigError (broken) or UnsupportedModel (a variant)."""
    raw = _read_object(folder / "config.json")
    if raw is None:
        raise ConfigError(
            f"{folder.name} has no config.json", stage="load", remedy="name a checkpoint folder"
        )
    # As in transformers, an instruct model's end tokens in generation_config.json go first.
    generation = _read_object(folder / "generation_config.json") or {}
    if generation.get("eos_token_id") is not None:
        raw = {**raw, "eos_token_id": generation["eos_token_id"]}
    return parse_config(ConfigFields(raw))


def parse_config(fields: ConfigFields) -> LlamaConfig:
    """The typed configuration of a raw ``config.json``; see ``load_config`` for errors."""
    architecture, family = _family(fields)
    _refuse_variants(fields, family)
    num_heads = fields.integer("num_attention_heads", at_least=1)
    hidden_size = fields.integer("hidden_size", at_least=1)
    head_dim = fields.integer("head_dim", family.head_dim or hidden_size // num_heads, at_least=2)
    config = LlamaConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", at_least=1),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", at_least=1),
        num_layers=fields.integer("num_hidden_layers", at_least=1),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads, at_least=1),
        head_dim=head_dim,
        max_position_tokens=fields.integer(
            "max_position_embeddings", family.max_position_tokens, at_least=1
        ),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields, head_dim),
        qk_norm=family.qk_norm,
        attention_bias=fields.boolean("attention_bias", False),
        tied_embeddings=fields.boolean("tie_word_embeddings", False),
        eos_token_ids=fields.integer_or_list("eos_token_id"),
    )
    _check_consistency(config)
    return config


def _family(fields: ConfigFields) -> tuple[str, _Family]:
    names = fields.strings("architectures", ())
    known = [name for name in names if name in _FAMILIES]
    if len(names) != 1 or not known:
        raise UnsupportedModel(
            f"config key 'architectures' is {list(names)}; one of {sorted(_FAMILIES)} is supported",
            stage="load",
        )
    return known[0], _FAMILIES[known[0]]


# What must hold for this code to compute the right thing: (key, accepted value); absent is fine.
_REQUIRED_VALUES: tuple[tuple[str, object], ...] = (
    ("hidden_act", "silu"),
    ("mlp_bias", False),
    ("pretraining_tp", 1),
    ("use_sliding_window", False),
    ("partial_rotary_factor", 1.0),
)


def _refuse_variants(fields: ConfigFields, family: _Family) -> None:
    for key, accepted in (("model_type", family.model_type), *_REQUIRED_VALUES):
        found = fields.get(key, accepted)
        if found != accepted:
            raise UnsupportedModel(
                f"config key {key!r} is {found!r}; only {accepted!r} is supported", stage="load"
            )
    for kind in fields.strings("layer_types", ()):
        if kind != "full_attention":
            raise UnsupportedModel(
                f"config key 'layer_types' names {kind!r}; only 'full_attention' is supported",
                stage="load",
            )
    if fields.has("quantization_config"):
        raise UnsupportedModel(
            "config key 'quantization_config' marks quantised weights, which this family can't read",
            stage="load",
            remedy="use a float32, bfloat16 or float16 checkpoint",
        )


def _rope(fields: ConfigFields, head_dim: int) -> RopeParams:
    nested = fields.section("rope_parameters")
    theta = (nested if nested is not None and nested.has("rope_theta") else fields).number(
        "rope_theta", 10000.0
    )
    scaling = nested if nested is not None else fields.section("rope_scaling")
    if scaling is None:
        return RopeParams(head_dim, theta)
    name = scaling.get("rope_type", scaling.get("type", RopeKind.DEFAULT.value))
    known = {kind.value: kind for kind in RopeKind}
    if not isinstance(name, str) or name not in known:
        raise UnsupportedModel(
            f"rope type {name!r} is not supported; known: {sorted(known)}", stage="load"
        )
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            "rope 'partial_rotary_factor' other than 1.0 is not supported", stage="load"
        )
    return _scaled(scaling, RopeParams(head_dim, theta, known[name]))


def _scaled(scaling: ConfigFields, plain: RopeParams) -> RopeParams:
    match plain.kind:
        case RopeKind.DEFAULT:
            return plain
        case RopeKind.LINEAR:
            return RopeParams(plain.dim, plain.theta, plain.kind, _factor(scaling))
        case RopeKind.LLAMA3:
            low = scaling.number("low_freq_factor")
            high = scaling.number("high_freq_factor")
            if low >= high:
                raise ConfigError(
                    f"rope 'low_freq_factor' {low} must be below 'high_freq_factor' {high}",
                    stage="load",
                )
            context = scaling.integer("original_max_position_embeddings", at_least=1)
            return RopeParams(
                plain.dim, plain.theta, plain.kind, _factor(scaling), context, low, high
            )


def _factor(scaling: ConfigFields) -> float:
    factor = scaling.number("factor")
    if factor < 1.0:
        raise ConfigError(f"rope 'factor' is {factor}, must be at least 1", stage="load")
    return factor


def _check_consistency(config: LlamaConfig) -> None:
    checks = (
        (
            config.num_heads % config.num_kv_heads == 0,
            "num_attention_heads must divide by num_key_value_heads",
        ),
        (config.head_dim % 2 == 0, "head_dim must be even"),
    )
    for holds, sentence in checks:
        if not holds:
            raise ConfigError(f"inconsistent config: {sentence}", stage="load")


def _read_object(path: Path) -> dict[str, object] | None:
    """A JSON object, or None when there is no such file."""
    if not path.exists():
        return None
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path.name}: {error}", stage="load") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path.name} holds a {type(raw).__name__}, not an object", stage="load")
    return raw
