"""Writes and reads the small model as a checkpoint folder with official tensor names."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tools.tiny_dsv4_config import TinyConfig
from tools.tiny_dsv4_model import TinyDeepseekV4

# The official checkpoints keep these in fp32; everything else is bf16 (tid2eid stays int64).
_FP32_MARKS = ("hc_", "attn_sink", ".ape", "gate.bias")


def export_tensors(model: TinyDeepseekV4) -> dict[str, torch.Tensor]:
    """The state dict in the official dtypes."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        keep = not value.is_floating_point() or any(mark in name for mark in _FP32_MARKS)
        tensors[name] = (value if keep else value.to(torch.bfloat16)).contiguous().clone()
    return tensors


def export_checkpoint(model: TinyDeepseekV4, folder: Path) -> None:
    """Write model.safetensors and config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(export_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.official_json(), indent=2) + "\n")


def read_config(folder: Path) -> TinyConfig:
    """The TinyConfig a folder was exported with."""
    content = json.loads((folder / "config.json").read_text())
    scaling = content["rope_scaling"]
    values = {
        field.name: content[field.name] for field in fields(TinyConfig) if field.name in content
    }
    return TinyConfig(
        **values,
        layer_ratios=tuple(content["compress_ratios"][: content["num_hidden_layers"]]),
        yarn_factor=scaling["factor"],
        yarn_original_tokens=scaling["original_max_position_embeddings"],
        yarn_beta_fast=scaling["beta_fast"],
        yarn_beta_slow=scaling["beta_slow"],
    )


def load_checkpoint(folder: Path) -> TinyDeepseekV4:
    """The exported model in fp32, for evaluation."""
    model = TinyDeepseekV4(read_config(folder))
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict(
        {k: v.float() if v.is_floating_point() else v for k, v in tensors.items()}
    )
    return model.eval()
