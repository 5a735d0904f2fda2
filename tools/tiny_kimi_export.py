"""Writes and reads the small Kimi Linear model as a checkpoint folder with published tensor names."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tools.tiny_kimi_config import read_config
from tools.tiny_kimi_model import TinyKimi

# Published checkpoints keep these in fp32; everything else is bf16.
_FP32_MARKS = ("A_log", "dt_bias", "e_score_correction_bias")


def export_tensors(model: TinyKimi) -> dict[str, torch.Tensor]:
    """The state dict in the published dtypes."""
    return {
        name: (value if any(mark in name for mark in _FP32_MARKS) else value.to(torch.bfloat16))
        .detach()
        .contiguous()
        .clone()
        for name, value in model.state_dict().items()
    }


def export_checkpoint(model: TinyKimi, folder: Path) -> None:
    """Write model.safetensors and config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(export_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.published_json(), indent=2) + "\n")


def load_checkpoint(folder: Path) -> TinyKimi:
    """The exported model in fp32, for evaluation."""
    model = TinyKimi(read_config(folder))
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name: value.float() for name, value in tensors.items()})
    return model.eval()
