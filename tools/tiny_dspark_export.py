"""Writes and reads the small DSPARK draft as the folder `dspark/` inside its target's."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tools.tiny_dspark_config import read_config
from tools.tiny_dspark_model import TinyDSpark
from tools.tiny_kimi_model import TinyKimi

DRAFT_FOLDER = "dspark"


def export_draft(draft: TinyDSpark, target_folder: Path) -> None:
    """Write the draft's own tensors in bf16, and its config.json."""
    folder = target_folder / DRAFT_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in draft.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(draft.config.published_json(), indent=2) + "\n")


def load_draft(target_folder: Path, target: TinyKimi) -> TinyDSpark:
    """The exported draft in fp32, for evaluation."""
    folder = target_folder / DRAFT_FOLDER
    draft = TinyDSpark(read_config(folder), target)
    tensors = load_file(folder / "model.safetensors")
    draft.load_state_dict({name: value.float() for name, value in tensors.items()})
    return draft.eval()
