"""Kimi Linear configuration, parsed from a checkpoint's ``config.json``.

Two spellings are read: the published one (``linear_attn_config`` with 1-indexed layer lists,
``num_experts``, ``model_max_length``) and the one transformers saves or uses in code
(``layer_types``, ``mlp_layer_types``, ``linear_head_dim``, ``num_local_experts``). Which layers are
recurrent is never guessed. Variants that only look alike (Kimi-K3) are refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from sluice.errors import ConfigError, UnsupportedModel
from sluice.models.config_fields import ConfigFields
from sluice.models.kimi_linear.moe import MoeParams
from sluice.parallel.cut import share

ARCHITECTURE = "KimiLinearForCausalLM"


class LayerKind(Enum):
    """How a layer mixes tokens (values: transformers' names)."""

    KDA = "linear_attention"  # Kimi Delta Attention: one fixed-size state a request
    MLA = "full_attention"  # multi-head latent attention without positions


@dataclass(frozen=True)
class KdaShape:
    """Sizes of the recurrent layers. ``conv_width`` tokens go into each convolution output.

    Published models have ``key_dim == value_dim``; ``value_head_dim`` in the config sets them apart.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def columns(self) -> int:
        """Earlier tokens the convolution still needs."""
        return self.conv_width - 1

    @property
    def head_channels(self) -> int:
        """Convolved channels of one head: query, key, value."""
        return 2 * self.key_dim + self.value_dim

    def of_rank(self, ranks: int) -> KdaShape:
        return replace(self, num_heads=share("KDA num_heads", self.num_heads, ranks))


@dataclass(frozen=True)
class MlaShape:
    """Sizes of the attention layers. A latent row is ``latent_dim + shared_dim`` wide."""

    num_heads: int
    latent_dim: int  # kv_lora_rank
    shared_dim: int  # qk_rope_head_dim: a key part that all heads share; never rotated
    nope_dim: int
    value_dim: int

    @property
    def row_dim(self) -> int:
        return self.latent_dim + self.shared_dim

    @property
    def scale(self) -> float:
        return float((self.nope_dim + self.shared_dim) ** -0.5)

    def of_rank(self, ranks: int) -> MlaShape:
        return replace(self, num_heads=share("num_attention_heads", self.num_heads, ranks))


@dataclass(frozen=True)
class KimiLinearConfig:
    """Everything the forward pass needs to know; one item a layer in ``layer_kinds``, ``moe_layers``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_position_tokens: int
    layer_kinds: tuple[LayerKind, ...]
    moe_layers: tuple[bool, ...]
    kda: KdaShape
    mla: MlaShape
    num_experts: int
    moe_intermediate_size: int
    num_shared_experts: int
    moe: MoeParams
    norm_eps: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """Layers of one kind (0-indexed), ascending."""
        return tuple(i for i, k in enumerate(self.layer_kinds) if k is kind)

    def of_rank(self, ranks: int) -> KimiLinearConfig:
        """What one of ``ranks`` computes: its heads. Raises ConfigError where they can't share equally."""
        if ranks == 1:
            return self
        return replace(self, kda=self.kda.of_rank(ranks), mla=self.mla.of_rank(ranks))


def load_config(folder: Path) -> KimiLinearConfig:
    """Parse ``folder/config.json``. Raises ConfigError (broken) or UnsupportedModel (a variant)."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path.name}: {error}", stage="load") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path.name} holds a {type(raw).__name__}, not an object", stage="load")
    return parse_config(ConfigFields(raw))


def parse_config(fields: ConfigFields) -> KimiLinearConfig:
    """The typed configuration of a raw ``config.json``; see ``load_config`` for errors."""
    _refuse_variants(fields)
    num_layers = fields.integer("num_hidden_layers", at_least=1)
    linear = fields.section("linear_attn_config")
    config = KimiLinearConfig(
        vocab_size=fields.integer("vocab_size", at_least=1),
        hidden_size=fields.integer("hidden_size", at_least=1),
        intermediate_size=fields.integer("intermediate_size", at_least=1),
        max_position_tokens=_spelled(
            fields, "model_max_length", "max_position_embeddings", 1048576
        ),
        layer_kinds=_layer_kinds(fields, linear, num_layers),
        moe_layers=_moe_layers(fields, num_layers),
        kda=_kda(fields, linear),
        mla=_mla(fields),
        num_experts=_spelled(fields, "num_experts", "num_local_experts"),
        moe_intermediate_size=fields.integer("moe_intermediate_size", at_least=1),
        num_shared_experts=_spelled(fields, "num_shared_experts", "n_shared_experts", 1),
        moe=MoeParams(
            experts_per_token=_spelled(fields, "num_experts_per_token", "num_experts_per_tok"),
            num_groups=_spelled(fields, "num_expert_group", "n_group", 1),
            groups_per_token=fields.integer("topk_group", 1, at_least=1),
            renormalise=_renormalise(fields),
            routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        ),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        bos_token_id=fields.optional_integer("bos_token_id"),
        eos_token_ids=fields.integer_or_list("eos_token_id"),
    )
    _check_consistency(config, fields)
    return config


# What must hold for this code to compute the right thing: (key, accepted value); absent is fine.
_REQUIRED_VALUES: tuple[tuple[str, object], ...] = (
    ("model_type", "kimi_linear"),
    ("hidden_act", "silu"),
    ("tie_word_embeddings", False),
    ("attention_bias", False),
    ("mla_use_nope", True),
    ("moe_router_activation_func", "sigmoid"),
    ("use_grouped_topk", True),
    ("num_nextn_predict_layers", 0),
)
_ABSENT_KEYS: tuple[tuple[str, str], ...] = (
    ("q_lora_rank", "a low-rank query projection"),
    ("quantization_config", "quantised weights"),
    ("rope_scaling", "scaled rotary positions"),
)
# Parts of key names that only Kimi-K3's text configs use, under the same model_type.
_K3_FRAGMENTS: tuple[tuple[str, str], ...] = (
    ("gate_lower_bound", "a safe gate"),
    ("safe_gate", "a safe gate"),
    ("full_rank", "a full-rank gate"),
    ("attn_res", "attention residuals"),
    ("attention_res", "attention residuals"),
    ("latent_moe", "a latent mixture of experts"),
    ("moe_latent", "a latent mixture of experts"),
    ("routed_expert_hidden_size", "a latent mixture of experts"),
)
_LINEAR_KEYS = frozenset(
    {
        "full_attn_layers",
        "kda_layers",
        "head_dim",
        "num_heads",
        "short_conv_kernel_size",
        "value_head_dim",
    }
)


def _refuse_variants(fields: ConfigFields) -> None:
    for architecture in fields.strings("architectures", (ARCHITECTURE,)):
        if architecture != ARCHITECTURE:
            raise UnsupportedModel(
                f"architecture {architecture!r} is not {ARCHITECTURE!r}", stage="load"
            )
    _refuse_k3(fields, "")
    linear = fields.section("linear_attn_config")
    if linear is not None:
        _refuse_k3(linear, "linear_attn_config.")
        for key in linear.names():
            if key not in _LINEAR_KEYS and linear.has(key):
                raise UnsupportedModel(
                    f"config key 'linear_attn_config.{key}' is unknown; known: "
                    f"{sorted(_LINEAR_KEYS)}",
                    stage="load",
                )
    for key, accepted in _REQUIRED_VALUES:
        found = fields.get(key, accepted)
        if found != accepted:
            raise UnsupportedModel(
                f"config key {key!r} is {found!r}; only {accepted!r} is supported", stage="load"
            )
    for key, meaning in _ABSENT_KEYS:
        if fields.has(key):
            raise UnsupportedModel(
                f"config key {key!r} is {fields.get(key)!r}: {meaning} is not supported",
                stage="load",
            )


def _refuse_k3(fields: ConfigFields, path: str) -> None:
    for key in fields.names():
        value = fields.get(key)
        if value is None or value is False:
            continue  # switched off is as good as absent
        for fragment, meaning in _K3_FRAGMENTS:
            if fragment in key:
                raise UnsupportedModel(
                    f"config key {path + key!r} is {value!r}: {meaning} marks Kimi-K3, which this "
                    "model code does not compute",
                    stage="load",
                    remedy="use a Kimi Linear checkpoint",
                )


def _layer_kinds(
    fields: ConfigFields, linear: ConfigFields | None, num_layers: int
) -> tuple[LayerKind, ...]:
    listed = _listed_kinds(linear, num_layers)
    if not fields.has("layer_types"):
        if listed is None:
            raise ConfigError(
                "config key 'linear_attn_config.kda_layers' is missing, and so is 'layer_types'",
                stage="load",
                remedy="name every layer's kind; there is no default pattern",
            )
        return listed
    names = fields.strings("layer_types")
    known = {kind.value: kind for kind in LayerKind}
    for name in names:
        if name not in known:
            raise UnsupportedModel(
                f"config key 'layer_types' names {name!r}; known: {sorted(known)}", stage="load"
            )
    if len(names) != num_layers:
        raise ConfigError(
            f"layer_types has {len(names)} items for {num_layers} layers", stage="load"
        )
    kinds = tuple(known[name] for name in names)
    if listed is not None and listed != kinds:
        raise ConfigError(
            "layer_types and linear_attn_config's layer lists (1-indexed) disagree", stage="load"
        )
    return kinds


def _listed_kinds(linear: ConfigFields | None, num_layers: int) -> tuple[LayerKind, ...] | None:
    """From the two 1-indexed lists, which must share out ``1 .. num_layers`` exactly."""
    if linear is None or not (linear.has("kda_layers") or linear.has("full_attn_layers")):
        return None
    kind_of: dict[int, LayerKind] = {}
    for key, kind in (("kda_layers", LayerKind.KDA), ("full_attn_layers", LayerKind.MLA)):
        for layer in linear.integers(key):
            if not 1 <= layer <= num_layers:
                raise ConfigError(
                    f"config key 'linear_attn_config.{key}' names layer {layer}; "
                    f"layers are numbered 1..{num_layers}",
                    stage="load",
                )
            if layer in kind_of:
                raise ConfigError(
                    f"config key 'linear_attn_config.{key}' names layer {layer}, which is listed "
                    f"already as {kind_of[layer].value}",
                    stage="load",
                )
            kind_of[layer] = kind
    missing = [layer for layer in range(1, num_layers + 1) if layer not in kind_of]
    if missing:
        raise ConfigError(
            f"linear_attn_config lists no kind for layers {missing} of 1..{num_layers}",
            stage="load",
        )
    return tuple(kind_of[layer] for layer in range(1, num_layers + 1))


def _moe_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    if fields.has("mlp_layer_types"):
        names = fields.strings("mlp_layer_types")
        for name in names:
            if name not in ("dense", "sparse"):
                raise UnsupportedModel(
                    f"config key 'mlp_layer_types' names {name!r}; known: ['dense', 'sparse']",
                    stage="load",
                )
        if len(names) != num_layers:
            raise ConfigError(
                f"mlp_layer_types has {len(names)} items for {num_layers} layers", stage="load"
            )
        return tuple(name == "sparse" for name in names)
    first = fields.integer("first_k_dense_replace", at_least=0)
    every = fields.integer("moe_layer_freq", 1, at_least=1)
    return tuple(layer >= first and layer % every == 0 for layer in range(num_layers))


def _kda(fields: ConfigFields, linear: ConfigFields | None) -> KdaShape:
    if linear is not None and linear.has("head_dim"):
        key_dim = linear.integer("head_dim", at_least=1)
        return KdaShape(
            num_heads=linear.integer("num_heads", at_least=1),
            key_dim=key_dim,
            value_dim=linear.integer("value_head_dim", key_dim, at_least=1),
            conv_width=linear.integer("short_conv_kernel_size", at_least=2),
        )
    key_dim = fields.integer("linear_head_dim", at_least=1)
    return KdaShape(
        num_heads=fields.integer("linear_num_heads", at_least=1),
        key_dim=key_dim,
        value_dim=fields.integer("linear_value_head_dim", key_dim, at_least=1),
        conv_width=fields.integer("linear_conv_kernel_dim", at_least=2),
    )


def _mla(fields: ConfigFields) -> MlaShape:
    return MlaShape(
        num_heads=fields.integer("num_attention_heads", at_least=1),
        latent_dim=fields.integer("kv_lora_rank", at_least=1),
        shared_dim=fields.integer("qk_rope_head_dim", at_least=0),
        nope_dim=fields.integer("qk_nope_head_dim", at_least=1),
        value_dim=fields.integer("v_head_dim", at_least=1),
    )


def _spelled(fields: ConfigFields, published: str, in_code: str, default: int | None = None) -> int:
    """An integer of at least 1 under either of its two names."""
    key = in_code if fields.has(in_code) and not fields.has(published) else published
    if default is None:
        return fields.integer(key, at_least=1)
    return fields.integer(key, default, at_least=1)


def _renormalise(fields: ConfigFields) -> bool:
    in_code = not fields.has("moe_renormalize") and fields.has("norm_topk_prob")
    return fields.boolean("norm_topk_prob" if in_code else "moe_renormalize", True)


def _check_consistency(config: KimiLinearConfig, fields: ConfigFields) -> None:
    moe, heads = config.moe, config.mla.num_heads
    group_size = config.num_experts // moe.num_groups
    checks = (
        (
            all(config.layers_of(kind) for kind in LayerKind),
            "a model needs layers of both kinds",
        ),
        (
            fields.integer("num_key_value_heads", heads) == heads,
            "num_key_value_heads must equal num_attention_heads",
        ),
        (
            config.num_experts % moe.num_groups == 0,
            "num_experts must divide by num_expert_group",
        ),
        (moe.groups_per_token <= moe.num_groups, "topk_group must not exceed num_expert_group"),
        (
            moe.num_groups == 1 or group_size >= 2,
            "an expert group needs two experts: groups are ranked by their best two",
        ),
        (
            moe.experts_per_token <= moe.groups_per_token * group_size,
            "num_experts_per_token must fit into the chosen expert groups",
        ),
    )
    for holds, sentence in checks:
        if not holds:
            raise ConfigError(f"inconsistent config: {sentence}", stage="load")
