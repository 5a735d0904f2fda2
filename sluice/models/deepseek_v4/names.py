"""Tensor names: whatever a checkpoint calls a tensor, mapped to the published name.

Three spellings are known: published (``layers.0.attn.wq_a.weight``), saved by transformers
(``model.layers.0.attn.wq_a.weight``, with a few names of its own) and transformers' module names
(``model.layers.0.self_attn.q_a_proj.weight``). Stacked experts (module names only) become
``...ffn.experts.w13.weight [E, 2I, D]`` and ``...ffn.experts.w2.weight [E, D, I]``.
"""

from __future__ import annotations

import re

# Applied in order; each is a whole dotted part or a run of them.
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"hc_head\.hc_(fn|base|scale)$", r"hc_head_\1"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
        (r"\.sinks$", ".attn_sink"),
        (r"\.attn\.q_a_proj\.", ".attn.wq_a."),
        (r"\.q_b_proj\.", ".wq_b."),
        (r"\.attn\.q_a_norm\.", ".attn.q_norm."),
        (r"\.o_a_proj\.", ".wo_a."),
        (r"\.o_b_proj\.", ".wo_b."),
        (r"\.kv_proj\.", ".wkv."),
        (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
        (r"\.gate_proj\.", ".wgate."),
        (r"\.position_bias$", ".ape"),
        # Below a compressor the norm is called "norm", beside it "kv_norm".
        (r"\.(compressor|indexer)\.kv_norm\.", r".\1.norm."),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
        (r"\.compressor\.indexer\.wq_b\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
        (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
        (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
        (r"\.experts\.gate_up_proj_scale_inv$", ".experts.w13.scale"),
        (r"\.experts\.down_proj_scale_inv$", ".experts.w2.scale"),
        (r"\.experts\.gate_up_proj$", ".experts.w13.weight"),
        (r"\.experts\.down_proj$", ".experts.w2.weight"),
        (r"\.weight_scale_inv$", ".scale"),
    )
)


def official_name(name: str) -> str:
    """The published name of a stored tensor; unknown names come back unchanged."""
    for pattern, replacement in _RULES:
        name = pattern.sub(replacement, name)
    return name


def is_draft(name: str) -> bool:
    """Whether a published name belongs to the NextN draft layer."""
    return name.startswith("mtp.")
