"""Shape of the small Kimi model's DSPARK draft, and its config.json with the public checkpoints' keys."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tools.tiny_tokenizer import EOS_ID, PAD_ID


@dataclass(frozen=True)
class TinyDSparkConfig:
    """Sizes of the draft; its layers are Qwen3's. `target_layer_ids` are 0-based."""

    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    block_size: int = 5
    target_layer_ids: tuple[int, ...] = (1, 2, 3)
    num_target_layers: int = 4
    mask_token_id: int = PAD_ID
    markov_rank: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 8192

    def published_json(self) -> dict[str, object]:
        """The content of config.json."""
        same = {name: value for name, value in self.__dict__.items() if name != "target_layer_ids"}
        return {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "torch_dtype": "bfloat16",
            **same,
            "target_layer_ids": list(self.target_layer_ids),
            "target_hidden_size": self.hidden_size,
            "markov_head_type": "rnn",
            "enable_confidence_head": False,
            "sample_from_anchor": True,
            "is_causal": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "eos_token_id": EOS_ID,
        }


def read_config(folder: Path) -> TinyDSparkConfig:
    """The sizes a draft folder was exported with."""
    content = json.loads((folder / "config.json").read_text())
    values = {name: content[name] for name in TinyDSparkConfig.__dataclass_fields__}
    return TinyDSparkConfig(**{**values, "target_layer_ids": tuple(content["target_layer_ids"])})
