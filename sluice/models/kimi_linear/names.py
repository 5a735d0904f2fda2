"""Tensor names: whatever a checkpoint calls a tensor, mapped to one canonical name.

Known spellings: published, which is also what transformers saves (``model.layers.0.self_attn.A_log``,
``model.layers.1.block_sparse_moe.experts.0.w1.weight``), and transformers' module names
(``...self_attn.forget_gate.A_log``, ``...mlp.experts.gate_up_proj``, ``...self_attn.conv1d.weight``).
Canonical names are the published ones without ``model.``, with ``mlp`` for both kinds of MLP.
"""

from __future__ import annotations

import re

_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^model\.", ""),
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.self_attn\.forget_gate\.", ".self_attn."),
        (r"\.experts\.gate_up_proj$", ".experts.w13.weight"),
        (r"\.experts\.down_proj$", ".experts.w2.weight"),
        (r"\.experts\.(\d+)\.gate_proj\.", r".experts.\1.w1."),
        (r"\.experts\.(\d+)\.up_proj\.", r".experts.\1.w3."),
        (r"\.experts\.(\d+)\.down_proj\.", r".experts.\1.w2."),
    )
)


def canonical_name(name: str) -> str:
    """The canonical name of a stored tensor; unknown names come back unchanged."""
    for pattern, replacement in _RULES:
        name = pattern.sub(replacement, name)
    return name
