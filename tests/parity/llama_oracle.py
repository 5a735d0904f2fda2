"""Tiny random Llama and Qwen3 checkpoints, saved by transformers, whose forward is the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 64
_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# No width is another's, so that a wrong axis can't hide: 6 / 2 heads of 8, and 4 / 2 heads of 16.
_LLAMA = _SHARED | {"num_attention_heads": 6, "num_key_value_heads": 2}
_QWEN3 = _SHARED | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
VARIANTS: dict[str, tuple[type, type, dict[str, object]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, _LLAMA),
    "llama3_rope_tied_biased": (
        LlamaConfig,
        LlamaForCausalLM,
        _LLAMA
        | {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "llama_linear_rope_all_heads": (
        LlamaConfig,
        LlamaForCausalLM,
        _LLAMA | {"rope_parameters": _LINEAR_ROPE, "num_key_value_heads": 6},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, _QWEN3),
    "qwen3_tied": (Qwen3Config, Qwen3ForCausalLM, _QWEN3 | {"tie_word_embeddings": True}),
}


@dataclass(frozen=True)
class Oracle:
    """A transformers model and the folder it was saved to."""

    model: PreTrainedModel
    folder: Path

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """``[T, V]`` of one whole forward."""
        logits: Tensor = self.model(torch.tensor([list(ids)]), use_cache=False).logits
        return logits[0]

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """What ``generate`` adds, the end token included."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        added: list[int] = out[0, len(prompt) :].tolist()
        return added


def save_oracle(variant: str, folder: Path, seed: int = 0, max_shard_size: str = "50GB") -> Oracle:
    """Every parameter is random, norms and biases included: one left out shows."""
    config_class, model_class, settings = VARIANTS[variant]
    model: PreTrainedModel = model_class(config_class(**settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.25 * noise)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return Oracle(model, folder)
