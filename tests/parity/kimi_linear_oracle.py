"""Tiny random Kimi Linear models made by transformers: the truth our forward pass is held to."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import DynamicCache, KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear as hf

TINY: dict[str, object] = {
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 128,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention"],
    "mlp_layer_types": ["dense"] + ["sparse"] * 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 4,
    "routed_scaling_factor": 2.446,
    "norm_topk_prob": True,
    "initializer_range": 0.15,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
VALUE_DIM = 24  # of the "wide" variant, whose recurrent states are 16 x 24
VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    # Values wider than keys, so that a transposed state can't hide; transformers' configuration only
    # knows square ones, so these layers are built here from its kernels.
    "wide": {},
    # Attention last, as published, grouped experts, two shared ones, unnormalised weights.
    "grouped": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        "num_hidden_layers": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "linear_conv_kernel_dim": 3,
    },
}


class WideDeltaAttention(hf.KimiLinearDeltaAttention):  # type: ignore[misc]
    """transformers' layer with values of another width than keys, without a cache."""

    def __init__(self, config: KimiLinearConfig, layer: int, value_dim: int) -> None:
        super().__init__(config, layer)
        hidden, heads, taps = config.hidden_size, self.num_heads, self.conv_kernel_size
        values = heads * value_dim
        channels = 2 * self.qkv_dim + values
        self.widths = [self.qkv_dim, self.qkv_dim, values]
        self.v_proj = nn.Linear(hidden, values, bias=False)
        self.conv1d = nn.Conv1d(
            channels, channels, taps, groups=channels, padding=taps - 1, bias=False
        )
        self.forget_gate.f_a_proj = nn.Linear(hidden, value_dim, bias=False)
        self.forget_gate.f_b_proj = nn.Linear(value_dim, self.qkv_dim, bias=False)
        self.g_a_proj = nn.Linear(hidden, value_dim, bias=False)
        self.g_b_proj = nn.Linear(value_dim, values, bias=False)
        self.o_norm = hf.KimiLinearRMSNormGated(value_dim, eps=self.layer_norm_epsilon)
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        length = hidden_states.shape[1]
        rows = torch.cat([p(hidden_states) for p in (self.q_proj, self.k_proj, self.v_proj)], -1)
        mixed = nn.functional.silu(self.conv1d(rows.transpose(1, 2))[..., :length]).transpose(1, 2)
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)) for part in mixed.split(self.widths, -1)
        )
        out, _ = hf.recurrent_kimi_delta_attention(
            q,
            k,
            v,
            g=self.forget_gate(hidden_states),
            beta=torch.sigmoid(self.b_proj(hidden_states)),
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
        )
        gate = self.g_b_proj(self.g_a_proj(hidden_states)).unflatten(-1, (self.num_heads, -1))
        return self.o_proj(self.o_norm(out, gate).flatten(2))


def randomise(module: nn.Module, seed: int) -> None:
    """Give every parameter that transformers initialises to a constant a telling value."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        leaf = name.rsplit(".", 1)[-1]
        noise = torch.randn(tensor.shape, generator=generator)
        with torch.no_grad():
            if "norm" in name and leaf == "weight":
                tensor.copy_(1 + 0.3 * noise)
            elif leaf == "A_log":
                tensor.copy_(0.7 * noise)
            elif leaf == "dt_bias":
                tensor.copy_(noise - 2)  # memories of a few to some hundred tokens
            elif leaf == "e_score_correction_bias":
                tensor.copy_(0.3 * noise)
            elif "conv1d" in name:
                tensor.copy_(0.5 * noise)
            elif tensor.is_floating_point():
                tensor.copy_(0.15 * noise)


def build_target(variant: str, seed: int = 0) -> KimiLinearForCausalLM:
    values = {**TINY, **VARIANTS[variant]}
    config = KimiLinearConfig(**{k: copy.deepcopy(v) for k, v in values.items()})
    config._attn_implementation = "eager"
    model = KimiLinearForCausalLM(config).eval()
    for index, layer in enumerate(model.model.layers):
        if variant == "wide" and layer.block_type == "linear_attention":
            layer.self_attn = WideDeltaAttention(config, index, VALUE_DIM)
        if layer.block_type == "full_attention":
            # transformers builds this norm with its default; published servers use the config's value.
            layer.self_attn.kv_a_layernorm.variance_epsilon = config.rms_norm_eps
    randomise(model, seed)
    return model.eval()


@dataclass(frozen=True)
class Oracle:
    """A target and the folder it was saved to."""

    target: KimiLinearForCausalLM
    folder: Path

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """``[T, V]`` of one whole forward."""
        return self.target(torch.tensor([ids]), use_cache=False).logits[0]

    @torch.no_grad()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Tokens from transformers' own cached decoding."""
        cache, ids, out = DynamicCache(config=self.target.config), prompt, []
        for _ in range(count):
            logits = self.target(torch.tensor([ids]), cache=cache, use_cache=True).logits
            ids = [int(logits[0, -1].argmax())]
            out += ids
        return out


def save_oracle(variant: str, folder: Path, seed: int = 0) -> Oracle:
    """Build, and save as transformers does."""
    target = build_target(variant, seed)
    if variant == "wide":
        _save_wide(target, folder)
    else:
        target.save_pretrained(folder)
    return Oracle(target, folder)


def _save_wide(target: KimiLinearForCausalLM, folder: Path) -> None:
    """transformers' module names as they are, and a published config with a value width."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.contiguous() for name, value in target.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    target.config.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    kinds = raw.pop("layer_types")
    for key in ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"):
        raw.pop(key)
    raw["linear_attn_config"] = {
        "head_dim": TINY["linear_head_dim"],
        "value_head_dim": VALUE_DIM,
        "num_heads": TINY["linear_num_heads"],
        "short_conv_kernel_size": TINY["linear_conv_kernel_dim"],
        "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"],
        "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"],
    }
    (folder / "config.json").write_text(json.dumps(raw))
