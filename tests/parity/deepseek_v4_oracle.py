"""Tiny random DeepSeek-V4 models made by transformers: the truth our forward pass is held to."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

TINY: dict[str, object] = {
    "vocab_size": 256,
    "hidden_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 4, 0],
    "sliding_window": 16,
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "compress_rope_theta": 1.6e5,
    "swiglu_limit": 10.0,
    "routed_scaling_factor": 1.5,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
    "initializer_range": 0.15,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
# Flash-like and Pro-like layer orders, and one with many short HCA windows.
VARIANTS: dict[str, dict[str, object]] = {
    "flash": {},
    "pro": {"compress_ratios": [128, 128, 4, 128, 4], "num_hash_layers": 2},
    "short_hca": {
        "compress_ratios": None,
        "layer_types": [
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
            "heavily_compressed_attention",
        ],
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 16,
        },
        "num_hidden_layers": 4,
    },
}


def tiny_config(variant: str, **overrides: object) -> DeepseekV4Config:
    values = {**TINY, **VARIANTS[variant], **overrides}
    return DeepseekV4Config(**{k: copy.deepcopy(v) for k, v in values.items() if v is not None})


def randomise(module: nn.Module, seed: int) -> None:
    """Give every parameter that transformers initialises to a constant a telling value."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        leaf = name.rsplit(".", 1)[-1]
        noise = torch.randn(tensor.shape, generator=generator)
        with torch.no_grad():
            if leaf == "tid2eid":
                _distinct_experts(tensor, generator)
            elif "norm" in name and leaf == "weight":
                tensor.copy_(1 + 0.3 * noise)
            elif leaf in ("sinks", "position_bias", "base", "hc_base"):
                tensor.copy_(0.5 * noise)
            elif leaf in ("scale", "hc_scale"):
                tensor.copy_(1 + 0.2 * noise)
            elif leaf == "e_score_correction_bias":
                tensor.copy_(0.3 * noise)
            elif tensor.is_floating_point() and "inv_freq" not in leaf:
                tensor.copy_(0.15 * noise)


def _distinct_experts(table_VK: Tensor, generator: torch.Generator) -> None:
    order = torch.rand((table_VK.shape[0], 8), generator=generator).argsort(-1)
    table_VK.copy_(order[:, : table_VK.shape[1]])


def build_target(variant: str, seed: int = 0, **overrides: object) -> DeepseekV4ForCausalLM:
    model = DeepseekV4ForCausalLM(tiny_config(variant, **overrides)).eval()
    randomise(model, seed)
    return model


class NextnOracle(nn.Module):
    """The NextN layer glued from transformers' modules (it has no class of its own there)."""

    def __init__(self, target: DeepseekV4ForCausalLM, seed: int) -> None:
        super().__init__()
        config = copy.deepcopy(target.config)
        config.num_hidden_layers = 1
        config.layer_types = ["sliding_attention"]
        config.mlp_layer_types = ["moe"]
        config._attn_implementation = "eager"
        self.config = config
        width = config.hidden_size
        self.block = hf.DeepseekV4DecoderLayer(config, 0)
        self.hc_head = hf.DeepseekV4HyperHead(config)
        self.enorm, self.hnorm, self.norm = (
            hf.DeepseekV4RMSNorm(width, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.e_proj, self.h_proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.rotary = hf.DeepseekV4RotaryEmbedding(config)
        randomise(self, seed)
        self.eval()
        # Tuples hide the shared parts from named_parameters().
        self._embed = (target.model.embed_tokens,)
        self._vocabulary = (target.lm_head,)

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.config)

    def forward(
        self, streams_TND: Tensor, next_ids_T: Tensor, start: int, cache: DynamicCache | None
    ) -> Tensor:
        """The draft's own streams ``[T, N, D]`` at positions ``start ..``."""
        embedded = self.e_proj(self.enorm(self._embed[0](next_ids_T)))
        x = (embedded.unsqueeze(1) + self.h_proj(self.hnorm(streams_TND))).unsqueeze(0)
        positions = torch.arange(start, start + x.shape[1]).unsqueeze(0)
        mask = create_sliding_window_causal_mask(
            config=self.config,
            inputs_embeds=x[:, :, 0],
            attention_mask=None,
            cache=cache,
            position_ids=positions,
        )
        angles = {
            kind: self.rotary(x[:, :, 0], position_ids=positions, layer_type=kind)
            for kind in ("main", "compress")
        }
        out = self.block(
            x,
            position_embeddings=angles,
            position_ids=positions,
            attention_mask=mask,
            input_ids=next_ids_T.unsqueeze(0),
            cache=cache,
        )
        return out[0]

    def logits(self, streams_TND: Tensor) -> Tensor:
        return self._vocabulary[0](self.norm(self.hc_head(streams_TND.unsqueeze(0))))[0]

    def official_tensors(self) -> dict[str, Tensor]:
        """Weights under the published ``mtp.0.*`` names."""
        from sluice.models.deepseek_v4.names import official_name

        tensors: dict[str, Tensor] = {}
        for name, value in self.state_dict().items():
            path = name.removeprefix("block.")
            path = official_name("layers.0." + path).removeprefix("layers.0.")
            path = path.replace("hc_head.hc_", "hc_head_")
            if path.startswith("ffn.experts.w"):
                tensors |= _per_expert(path, value)
            else:
                tensors["mtp.0." + path] = value.contiguous()
        return tensors


def _per_expert(path: str, stacked: Tensor) -> dict[str, Tensor]:
    """Published checkpoints hold one tensor an expert."""
    tensors = {}
    for expert, value in enumerate(stacked):
        prefix = f"mtp.0.ffn.experts.{expert}"
        if path.endswith("w13.weight"):
            gate, up = value.chunk(2)
            tensors[f"{prefix}.w1.weight"] = gate.clone()
            tensors[f"{prefix}.w3.weight"] = up.clone()
        else:
            tensors[f"{prefix}.w2.weight"] = value.clone()
    return tensors


@contextmanager
def ties_to_older_entries() -> Iterator[None]:
    """Let transformers' indexer break ties at the top-k border towards older entries, as we do.

    It leaves them to ``torch.topk``, whose choice depends on what else is in the row; in trained models
    whole scores are exactly 0 often enough for that to show. Its indexer's scores are the only
    three-dimensional ones that anything takes the top of.
    """
    real = torch.Tensor.topk

    def topk(scores: Tensor, k: int, dim: int = -1, **options: bool) -> object:
        if scores.dim() != 3:
            return real(scores, k, dim=dim, **options)
        order = scores.sort(dim=-1, descending=True, stable=True)
        return SimpleNamespace(values=order.values[..., :k], indices=order.indices[..., :k])

    torch.Tensor.topk = topk  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.topk = real  # type: ignore[method-assign]


@dataclass(frozen=True)
class Oracle:
    """A target, its draft, and the folder both were saved to."""

    target: DeepseekV4ForCausalLM
    nextn: NextnOracle
    folder: Path

    def streams_and_logits(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Pre-head streams ``[T, N, D]`` and logits ``[T, V]`` of one whole forward."""
        return streams_and_logits(self.target, ids)


def streams_and_logits(target: DeepseekV4ForCausalLM, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Pre-head streams ``[T, N, D]`` and logits ``[T, V]`` of one whole forward."""
    captured: list[Tensor] = []
    hook = target.model.layers[-1].register_forward_hook(
        lambda _module, _inputs, output: captured.append(output)
    )
    try:
        with torch.no_grad(), ties_to_older_entries():
            logits = target(torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        hook.remove()
    return captured[0][0], logits


def save_oracle(variant: str, folder: Path, seed: int = 0, **overrides: object) -> Oracle:
    """Build, save as transformers does, and add the draft's tensors to the same file."""
    target = build_target(variant, seed, **overrides)
    nextn = NextnOracle(target, seed + 1)
    target.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | nextn.official_tensors(), path, metadata={"format": "pt"})
    return Oracle(target, nextn, folder)
