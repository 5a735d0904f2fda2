"""Shape of the small DeepSeek-V4-structure model, and its config.json with the official keys."""

from __future__ import annotations

from dataclasses import dataclass

from tools.tiny_tokenizer import BOS_ID, EOS_ID, PAD_ID


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of the model; names follow the official config.json. `layer_ratios` has one entry a layer."""

    vocab_size: int = 512
    hidden_size: int = 128
    num_attention_heads: int = 4
    head_dim: int = 64
    qk_rope_head_dim: int = 8
    q_lora_rank: int = 64
    o_groups: int = 2
    o_lora_rank: int = 32
    sliding_window: int = 32
    layer_ratios: tuple[int, ...] = (0, 4, 128, 4)
    index_n_heads: int = 16
    index_head_dim: int = 16
    index_topk: int = 32
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 64
    num_hash_layers: int = 1
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 4
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn_factor: float = 16.0
    yarn_original_tokens: int = 512
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    max_position_embeddings: int = 8192

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the target; the NextN layer is not counted."""
        return len(self.layer_ratios)

    def official_json(self) -> dict[str, object]:
        """The content of config.json: official key names, ratios with the trailing 0 of the NextN layer."""
        return {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": 1,
            "head_dim": self.head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "q_lora_rank": self.q_lora_rank,
            "o_groups": self.o_groups,
            "o_lora_rank": self.o_lora_rank,
            "sliding_window": self.sliding_window,
            "compress_ratios": [*self.layer_ratios, 0],
            "index_n_heads": self.index_n_heads,
            "index_head_dim": self.index_head_dim,
            "index_topk": self.index_topk,
            "n_routed_experts": self.n_routed_experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.num_experts_per_tok,
            "moe_intermediate_size": self.moe_intermediate_size,
            "num_hash_layers": self.num_hash_layers,
            "num_nextn_predict_layers": 1,
            "routed_scaling_factor": self.routed_scaling_factor,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "swiglu_limit": self.swiglu_limit,
            "hidden_act": "silu",
            "hc_mult": self.hc_mult,
            "hc_sinkhorn_iters": self.hc_sinkhorn_iters,
            "hc_eps": self.hc_eps,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "compress_rope_theta": self.compress_rope_theta,
            "rope_scaling": {
                "type": "yarn",
                "factor": self.yarn_factor,
                "original_max_position_embeddings": self.yarn_original_tokens,
                "beta_fast": self.yarn_beta_fast,
                "beta_slow": self.yarn_beta_slow,
            },
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
        }
