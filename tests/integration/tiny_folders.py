"""Checkpoints of every family in folders, for widths of 1, 2 and 4: two shipped, Llama and Qwen3 random."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from sluice.models.config_fields import ConfigFields
from sluice.models.dspark.config import parse_config as parse_draft
from sluice.models.dspark.weights import read_weights as read_draft
from sluice.models.llama.config import parse_config
from sluice.models.llama.weights import read_weights
from tests.unit.models.dspark.tiny import DRAFT_CONFIG, Tensors

SHIPPED = Path(__file__).parents[2] / "models"
FAMILIES = ("tiny-dsv4", "tiny-kimi", "llama", "qwen3")
# Fewer key/value heads than four ranks: two ranks hold a copy of each.
_SHARED: dict[str, object] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
}
_LLAMA = _SHARED | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_QWEN3 = _SHARED | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": True,
    "tie_word_embeddings": True,
}
_DSPARK = (
    DRAFT_CONFIG
    | _SHARED
    | {
        "architectures": ["Qwen3DSparkModel"],
        "head_dim": 6,
        "target_layer_ids": [1, 0],
        "num_target_layers": 2,
        "mask_token_id": 63,
    }
)


def save_tiny(family: str, folder: Path) -> Path:
    """Where the family's checkpoint is; the random ones are made in ``folder``, Qwen3 with a DSPARK draft."""
    if family not in ("llama", "qwen3"):
        return SHIPPED / family
    raw = _LLAMA if family == "llama" else _QWEN3
    target = Tensors(0)
    read_weights(target, parse_config(ConfigFields(raw)))
    _save(folder, raw, target.made)
    if family == "qwen3":
        draft = Tensors(2)
        read_draft(draft, parse_draft(_DSPARK))
        _save(folder / "dspark", _DSPARK, draft.made)
    return folder


def _save(folder: Path, raw: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(dict(tensors), folder / "model.safetensors")
