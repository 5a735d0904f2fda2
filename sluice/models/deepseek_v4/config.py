"""DeepSeek-V4 model configuration, parsed from a checkpoint's ``config.json``.

Two spellings are read: the published one (``compress_ratios``, ``num_hash_layers``,
``rope_scaling``) and the one transformers saves (``layer_types``, ``compress_rates``,
``mlp_layer_types``, ``rope_parameters``). Variants that only look alike are refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from sluice.errors import ConfigError, UnsupportedModel
from sluice.models.config_fields import ConfigFields
from sluice.models.layers.hyper import HyperParams
from sluice.models.layers.moe import MoeParams
from sluice.models.layers.rope import RopeParams

ARCHITECTURE = "DeepseekV4ForCausalLM"
_PUBLISHED_CSA_RATIO = 4
_PUBLISHED_HCA_RATIO = 128


class LayerKind(Enum):
    """What an attention layer sees besides its raw window (values: transformers' names)."""

    WINDOW = "sliding_attention"
    CSA = "compressed_sparse_attention"
    HCA = "heavily_compressed_attention"


@dataclass(frozen=True)
class DeepseekV4Config:
    """Everything the forward pass needs to know. Widths in values, lengths in tokens.

    ``layer_kinds`` and ``hash_layers`` have one item a target layer; ``num_nextn_layers`` (0 or 1)
    says whether a NextN draft layer was trained; it is a window layer with a score router.
    """

    vocab_size: int
    hidden_size: int
    max_position_tokens: int
    layer_kinds: tuple[LayerKind, ...]
    hash_layers: tuple[bool, ...]
    csa_ratio: int
    hca_ratio: int
    window_tokens: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    num_index_heads: int
    index_dim: int
    index_topk: int
    num_experts: int
    moe_intermediate_size: int
    moe: MoeParams
    hyper: HyperParams
    norm_eps: float
    main_rope: RopeParams
    compress_rope: RopeParams
    num_nextn_layers: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    def ratio(self, layer: int) -> int:
        """Compression ratio of a target layer; 0 for window-only layers."""
        return self.ratio_of(self.layer_kinds[layer])

    def ratio_of(self, kind: LayerKind) -> int:
        return {LayerKind.WINDOW: 0, LayerKind.CSA: self.csa_ratio, LayerKind.HCA: self.hca_ratio}[
            kind
        ]

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """Target layers of one kind, ascending."""
        return tuple(i for i, k in enumerate(self.layer_kinds) if k is kind)

    def rope_of(self, kind: LayerKind) -> RopeParams:
        """The table a layer's queries, window rows, entries and indexer all use."""
        return self.main_rope if kind is LayerKind.WINDOW else self.compress_rope


def load_config(folder: Path) -> DeepseekV4Config:
    """Parse ``folder/config.json``. Raises ConfigError (broken) or UnsupportedModel (a variant)."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path.name}: {error}", stage="load") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path.name} holds a {type(raw).__name__}, not an object", stage="load")
    return parse_config(ConfigFields(raw))


def parse_config(fields: ConfigFields) -> DeepseekV4Config:
    """The typed configuration of a raw ``config.json``; see ``load_config`` for errors."""
    _refuse_variants(fields)
    num_layers = fields.integer("num_hidden_layers", at_least=1)
    csa_ratio, hca_ratio = _compression_ratios(fields)
    head_dim = fields.integer("head_dim", at_least=2)
    rope_dim = _rope_dim(fields, head_dim)
    norm_eps = fields.number("rms_norm_eps", 1e-6)
    main_rope, compress_rope = _rope_tables(fields, rope_dim)
    config = DeepseekV4Config(
        vocab_size=fields.integer("vocab_size", at_least=1),
        hidden_size=fields.integer("hidden_size", at_least=1),
        max_position_tokens=fields.integer("max_position_embeddings", 1048576, at_least=1),
        layer_kinds=_layer_kinds(fields, num_layers, csa_ratio, hca_ratio),
        hash_layers=_hash_layers(fields, num_layers),
        csa_ratio=csa_ratio,
        hca_ratio=hca_ratio,
        window_tokens=fields.integer("sliding_window", at_least=1),
        num_heads=fields.integer("num_attention_heads", at_least=1),
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_lora_rank=fields.integer("q_lora_rank", at_least=1),
        o_groups=fields.integer("o_groups", at_least=1),
        o_lora_rank=fields.integer("o_lora_rank", at_least=1),
        num_index_heads=fields.integer("index_n_heads", at_least=1),
        index_dim=fields.integer("index_head_dim", at_least=2),
        index_topk=fields.integer("index_topk", at_least=1),
        num_experts=fields.integer("n_routed_experts", at_least=1),
        moe_intermediate_size=fields.integer("moe_intermediate_size", at_least=1),
        moe=MoeParams(
            experts_per_token=fields.integer("num_experts_per_tok", at_least=1),
            routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
            swiglu_limit=fields.number("swiglu_limit"),
        ),
        hyper=HyperParams(
            num_streams=fields.integer("hc_mult", 4, at_least=1),
            sinkhorn_iters=fields.integer("hc_sinkhorn_iters", 20, at_least=1),
            hc_eps=fields.number("hc_eps", 1e-6),
            norm_eps=norm_eps,
        ),
        norm_eps=norm_eps,
        main_rope=main_rope,
        compress_rope=compress_rope,
        num_nextn_layers=fields.integer("num_nextn_predict_layers", 0, at_least=0),
        bos_token_id=fields.optional_integer("bos_token_id"),
        eos_token_ids=fields.integer_or_list("eos_token_id"),
    )
    _check_consistency(config)
    return config


# What must hold for this code to compute the right thing: (key, accepted value); absent is fine.
_REQUIRED_VALUES: tuple[tuple[str, object], ...] = (
    ("model_type", "deepseek_v4"),
    ("scoring_func", "sqrtsoftplus"),
    ("topk_method", "noaux_tc"),
    ("norm_topk_prob", True),
    ("n_shared_experts", 1),
    ("num_key_value_heads", 1),
    ("hidden_act", "silu"),
    ("tie_word_embeddings", False),
    ("attention_bias", False),
    ("mlp_bias", False),
)
_VARIANT_KEYS: tuple[tuple[str, str], ...] = (
    ("dspark", "DeepSeek-V4 with a DSpark draft"),
    ("engram", "DeepSeek-V4.1 (engram memory)"),
)


def _refuse_variants(fields: ConfigFields) -> None:
    for architecture in fields.strings("architectures", (ARCHITECTURE,)):
        if architecture != ARCHITECTURE:
            raise UnsupportedModel(
                f"architecture {architecture!r} is not {ARCHITECTURE!r}", stage="load"
            )
    for key in fields.names():
        for fragment, variant in _VARIANT_KEYS:
            if fragment in key:
                raise UnsupportedModel(
                    f"config key {key!r} marks {variant}, which this model code does not compute",
                    stage="load",
                    remedy="use a plain DeepSeek-V4 checkpoint with a NextN layer",
                )
    for key, accepted in _REQUIRED_VALUES:
        found = fields.get(key, accepted)
        if found != accepted:
            raise UnsupportedModel(
                f"config key {key!r} is {found!r}; only {accepted!r} is supported", stage="load"
            )
    nextn = fields.integer("num_nextn_predict_layers", 0, at_least=0)
    if nextn > 1:
        raise UnsupportedModel(
            f"config key 'num_nextn_predict_layers' is {nextn}; only 0 or 1 is supported",
            stage="load",
        )
    quantization = fields.section("quantization_config")
    method = quantization.get("quant_method", "fp8") if quantization else "fp8"
    if method != "fp8":
        raise UnsupportedModel(
            f"config key 'quantization_config.quant_method' is {method!r}; only 'fp8' is supported",
            stage="load",
        )


def _compression_ratios(fields: ConfigFields) -> tuple[int, int]:
    """(CSA ratio, HCA ratio): the published 4 and 128 unless ``compress_rates`` says otherwise."""
    rates = fields.section("compress_rates")
    if rates is None:
        return _PUBLISHED_CSA_RATIO, _PUBLISHED_HCA_RATIO
    csa = rates.integer(LayerKind.CSA.value, _PUBLISHED_CSA_RATIO, at_least=2)
    hca = rates.integer(LayerKind.HCA.value, _PUBLISHED_HCA_RATIO, at_least=2)
    if csa == hca:
        raise ConfigError(f"compress_rates gives {csa} for both kinds of layer", stage="load")
    return csa, hca


def _layer_kinds(
    fields: ConfigFields, num_layers: int, csa_ratio: int, hca_ratio: int
) -> tuple[LayerKind, ...]:
    if fields.has("layer_types"):
        names = fields.strings("layer_types")
        known = {kind.value: kind for kind in LayerKind}
        for name in names:
            if name not in known:
                raise UnsupportedModel(
                    f"config key 'layer_types' names {name!r}; known: {sorted(known)}", stage="load"
                )
        kinds = tuple(known[name] for name in names)
        if len(kinds) != num_layers:
            raise ConfigError(
                f"layer_types has {len(kinds)} items for {num_layers} layers", stage="load"
            )
        return kinds
    ratios = fields.integers("compress_ratios")
    kind_of = {0: LayerKind.WINDOW, csa_ratio: LayerKind.CSA, hca_ratio: LayerKind.HCA}
    for ratio in ratios:
        if ratio not in kind_of:
            hint = " (DeepSeek-V4.1)" if ratio in (1, 2) else ""
            raise UnsupportedModel(
                f"config key 'compress_ratios' holds {ratio}{hint}; supported: {sorted(kind_of)}",
                stage="load",
            )
    if len(ratios) < num_layers:
        raise ConfigError(
            f"compress_ratios has {len(ratios)} items for {num_layers} layers", stage="load"
        )
    # Items past the target's layers describe draft layers, which must be window-only.
    for index, ratio in enumerate(ratios[num_layers:], start=num_layers):
        if ratio != 0:
            raise UnsupportedModel(
                f"compress_ratios[{index}] is {ratio} for a draft layer, which must be 0",
                stage="load",
            )
    return tuple(kind_of[ratio] for ratio in ratios[:num_layers])


def _hash_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    if fields.has("mlp_layer_types"):
        names = fields.strings("mlp_layer_types")
        for name in names:
            if name not in ("moe", "hash_moe"):
                raise UnsupportedModel(
                    f"config key 'mlp_layer_types' names {name!r}; known: ['hash_moe', 'moe']",
                    stage="load",
                )
        if len(names) != num_layers:
            raise ConfigError(
                f"mlp_layer_types has {len(names)} items for {num_layers} layers", stage="load"
            )
        return tuple(name == "hash_moe" for name in names)
    count = fields.integer("num_hash_layers", at_least=0)
    return tuple(layer < count for layer in range(num_layers))


def _rope_dim(fields: ConfigFields, head_dim: int) -> int:
    if fields.has("qk_rope_head_dim"):
        return fields.integer("qk_rope_head_dim", at_least=2)
    nested = fields.section("rope_parameters")
    main = nested.section("main") if nested else None
    source = main if main is not None and main.has("partial_rotary_factor") else fields
    return int(head_dim * source.number("partial_rotary_factor"))


def _rope_tables(fields: ConfigFields, rope_dim: int) -> tuple[RopeParams, RopeParams]:
    """(window layers' table, compressed layers' table)."""
    nested = fields.section("rope_parameters")
    main = nested.section("main") if nested else None
    compress = nested.section("compress") if nested else None
    if main is not None and compress is not None:
        return _rope_params(main, rope_dim, main.number("rope_theta")), _rope_params(
            compress, rope_dim, compress.number("rope_theta")
        )
    plain = RopeParams(rope_dim, fields.number("rope_theta", 10000.0))
    theta = fields.number("compress_rope_theta", 160000.0)
    scaling = fields.section("rope_scaling")
    if scaling is None:
        return plain, RopeParams(rope_dim, theta)
    return plain, _rope_params(scaling, rope_dim, theta)


def _rope_params(section: ConfigFields, rope_dim: int, theta: float) -> RopeParams:
    kind = section.get("rope_type", section.get("type", "default"))
    if kind == "default":
        return RopeParams(rope_dim, theta)
    if kind != "yarn":
        raise UnsupportedModel(
            f"rope type {kind!r} is not supported; known: ['default', 'yarn']", stage="load"
        )
    if section.number("attention_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            "rope 'attention_factor' other than 1.0 is not part of DeepSeek-V4", stage="load"
        )
    return RopeParams(
        dim=rope_dim,
        theta=theta,
        factor=section.number("factor"),
        original_max_position_tokens=section.integer("original_max_position_embeddings"),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
    )


def _check_consistency(config: DeepseekV4Config) -> None:
    checks = (
        (config.num_heads % config.o_groups == 0, "num_attention_heads must divide by o_groups"),
        (config.rope_dim % 2 == 0, "the rope width must be even"),
        (config.head_dim % 2 == 0, "head_dim must be even"),
        (config.index_dim % 2 == 0, "index_head_dim must be even"),
        (config.rope_dim <= config.head_dim, "the rope width must fit into head_dim"),
        (config.rope_dim <= config.index_dim, "the rope width must fit into index_head_dim"),
        (
            config.moe.experts_per_token <= config.num_experts,
            "num_experts_per_tok must not exceed n_routed_experts",
        ),
    )
    for holds, sentence in checks:
        if not holds:
            raise ConfigError(f"inconsistent config: {sentence}", stage="load")
