"""Shape of the small Kimi Linear model, and its config.json in the published spelling."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tools.tiny_tokenizer import BOS_ID, EOS_ID, PAD_ID


@dataclass(frozen=True)
class TinyKimiConfig:
    """Sizes of the model. `mla_layers` is 0-based; all other layers are recurrent (KDA).

    `rms_norm_eps` is also the default of transformers' latent norm, which does not read the config.
    """

    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    mla_layers: tuple[int, ...] = (3,)
    linear_num_heads: int = 4
    linear_head_dim: int = 32
    conv_width: int = 4
    num_attention_heads: int = 4
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    num_experts: int = 8
    num_experts_per_token: int = 2
    moe_intermediate_size: int = 64
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 2.446
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 8192

    def published_json(self) -> dict[str, object]:
        """The content of config.json; layer lists are 1-based there."""
        layers = range(self.num_hidden_layers)
        return {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_attention_heads,
            "q_lora_rank": None,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
            "mla_use_nope": True,
            "linear_attn_config": {
                "kda_layers": [i + 1 for i in layers if i not in self.mla_layers],
                "full_attn_layers": [i + 1 for i in self.mla_layers],
                "num_heads": self.linear_num_heads,
                "head_dim": self.linear_head_dim,
                "short_conv_kernel_size": self.conv_width,
            },
            "num_experts": self.num_experts,
            "num_experts_per_token": self.num_experts_per_token,
            "num_shared_experts": 1,
            "num_expert_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": self.moe_intermediate_size,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "moe_layer_freq": 1,
            "first_k_dense_replace": self.first_k_dense_replace,
            "routed_scaling_factor": self.routed_scaling_factor,
            "num_nextn_predict_layers": 0,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "model_max_length": self.max_position_embeddings,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
        }


def read_config(folder: Path) -> TinyKimiConfig:
    """The sizes a folder was exported with."""
    content = json.loads((folder / "config.json").read_text())
    linear = content["linear_attn_config"]
    same = set(TinyKimiConfig.__dataclass_fields__) & set(content)
    return TinyKimiConfig(
        **{name: content[name] for name in same},
        mla_layers=tuple(i - 1 for i in linear["full_attn_layers"]),
        linear_num_heads=linear["num_heads"],
        linear_head_dim=linear["head_dim"],
        conv_width=linear["short_conv_kernel_size"],
        max_position_embeddings=content["model_max_length"],
    )
