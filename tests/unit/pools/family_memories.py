"""A memory for every family's true state needs, small, and ways to mark its rows byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sluice.config import PoolConfig, PoolMode
from sluice.layout.component import Component
from sluice.models.config_fields import ConfigFields
from sluice.models.inventory import INVENTORIES, read_config_file, read_draft_needs
from sluice.pools.base import BufferSpec
from sluice.pools.memory import Memory, build_memory

MODELS = Path(__file__).parents[3] / "models"
PAGE_TOKENS = 128

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # one block of mxfp8
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class FamilyMemory:
    """Which model's state, with its draft's or without."""

    model: str
    draft: bool
    mode: PoolMode = PoolMode.PAGED
    kv_dtype: str = "float32"

    def __str__(self) -> str:
        draft = "draft" if self.draft else "plain"
        return f"{self.model}-{draft}-{self.mode.value}-{self.kv_dtype}"

    def needs(self) -> tuple[tuple[BufferSpec, ...], int]:
        """Specs of all buffers, and how many tokens a step verifies."""
        if self.model == "qwen3":
            fields = ConfigFields(QWEN3)
            return INVENTORIES["Qwen3ForCausalLM"](fields, self.kv_dtype).target, 4
        folder = MODELS / self.model
        stated = read_config_file(folder / "config.json").state_needs(self.kv_dtype)
        if not self.draft:
            return stated.target, 1
        if (own := folder / "dspark" / "config.json").is_file():
            draft = read_draft_needs(own, stated, self.kv_dtype, None)
            return (*stated.target, *draft.state), draft.steps + 1
        return (*stated.target, *stated.draft), 4

    def build(self) -> tuple[Memory, int]:
        """The memory, too small for everybody, and the tokens a step verifies."""
        specs, verify_tokens = self.needs()
        config = PoolConfig(
            mode=self.mode,
            page_tokens=PAGE_TOKENS,
            num_pages=20,
            num_window_pages=9,
            num_slots=4,
            kv_dtype=self.kv_dtype,
        )
        return build_memory(specs, config, verify_tokens), verify_tokens


FAMILIES = (
    FamilyMemory("tiny-dsv4", draft=True),
    FamilyMemory("tiny-dsv4", draft=True, mode=PoolMode.UNIFIED),
    FamilyMemory("tiny-dsv4", draft=False, mode=PoolMode.UNIFIED),
    FamilyMemory("tiny-kimi", draft=True),
    FamilyMemory("tiny-kimi", draft=False),
    FamilyMemory("qwen3", draft=False),
    FamilyMemory("qwen3", draft=False, kv_dtype="mxfp8"),
)


def mark_rows(
    memory: Memory, component: Component, rows: Sequence[int], marks: Sequence[int]
) -> None:
    """Every byte of row ``rows[i]`` becomes ``marks[i]``, in all layers."""
    for entry in component.entries:
        row_bytes = _row_bytes(memory, component, entry.layer_id)
        row_bytes[list(rows)] = torch.tensor(list(marks), dtype=torch.uint8)[:, None]


def read_marks(memory: Memory, component: Component, rows: Sequence[int]) -> list[list[int]]:
    """One list a layer. Asserts that a row holds one mark throughout."""
    out = []
    for entry in component.entries:
        read = _row_bytes(memory, component, entry.layer_id)[list(rows)]
        assert torch.equal(read, read[:, :1].expand_as(read)), f"{component.name}: a torn row"
        out.append(read[:, 0].tolist())
    return out


def _row_bytes(memory: Memory, component: Component, layer_id: int) -> Tensor:
    buffer = memory.buffer(component.name, layer_id)
    return buffer.view(len(buffer), -1).view(torch.uint8)
