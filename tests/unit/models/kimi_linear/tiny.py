"""A tiny Kimi Linear model with random weights, without transformers, and a way to drive it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sluice.config import PoolConfig
from sluice.models.base import ForwardBatch, ModelInfo, Segment
from sluice.models.config_fields import ConfigFields
from sluice.models.kimi_linear.config import KimiLinearConfig, parse_config
from sluice.models.kimi_linear.model import KimiLinearTarget
from sluice.models.kimi_linear.weights import read_target
from sluice.models.recurrent import PendingVerify
from sluice.parallel.cut import Cuts, cut
from sluice.pools.base import RequestTables
from sluice.pools.memory import Memory, build_memory
from sluice.types import RequestId

VERIFY_TOKENS = 5
# Keys and values of different widths: a transposed state doesn't even fit. All widths are multiples of
# 16, as in real models: elementwise functions use other code for what is left of a vector, and bits
# would depend on where a row lies.
PUBLISHED: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mla_use_nope": True,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "model_max_length": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "linear_attn_config": {
        "head_dim": 16,
        "value_head_dim": 32,
        "num_heads": 2,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3],
    },
}
INFO = ModelInfo("Kimi", "", "", "", 64, 4096, 0, (0, 0, 1, 0), (1,), False, "")


def published(**changes: Any) -> ConfigFields:
    """The config above with some keys changed; a value of None stands for null."""
    return ConfigFields({**copy.deepcopy(PUBLISHED), **changes})


def with_linear(**changes: Any) -> ConfigFields:
    """The same with keys of ``linear_attn_config`` changed."""
    return published(linear_attn_config={**PUBLISHED["linear_attn_config"], **changes})


class RandomSource:
    """A ``TensorSource`` that has every tensor asked for, one tensor an expert, and remembers names."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.names: list[str] = []

    def has(self, name: str) -> bool:
        return not name.endswith((".experts.w13.weight", ".conv1d.weight"))

    def take(
        self, name: str, shape: tuple[int, ...], *, wide: bool = False, cuts: Cuts = ()
    ) -> Tensor:
        return cut(self._make(name, shape), cuts)

    def _make(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.names.append(name)
        noise = torch.randn(shape, generator=self._generator)
        if "norm" in name:
            return 1 + 0.3 * noise
        if name.endswith("dt_bias"):
            return noise - 2
        return noise * (0.5 if "conv1d" in name or name.endswith("A_log") else 0.25)

    def take_ids(self, name: str, shape: tuple[int, ...]) -> Tensor:
        raise AssertionError(name)


def tiny_target(config: KimiLinearConfig | None = None) -> KimiLinearTarget:
    config = config or parse_config(published())
    return KimiLinearTarget(config, read_target(RandomSource(), config), INFO)


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 64, (length,), generator=generator).tolist())


@dataclass(frozen=True)
class State:
    """One request's recurrent state: every layer's columns and matrices, and the count."""

    conv: Tensor
    recurrent: Tensor
    length: int

    def equals(self, other: State) -> bool:
        """Bit for bit."""
        return (
            torch.equal(self.conv, other.conv)
            and torch.equal(self.recurrent, other.recurrent)
            and self.length == other.length
        )


class Driver:
    """Requests of one model on one memory, whose fresh and padding items hold NaN."""

    def __init__(
        self, target: KimiLinearTarget, *, num_slots: int = 12, kv_dtype: str = "float32"
    ) -> None:
        self.target = target
        config = PoolConfig(
            page_tokens=16, num_pages=180, num_slots=num_slots, kv_dtype=kv_dtype, fill="nan"
        )
        self.memory: Memory = build_memory(target.state_needs(kv_dtype), config, VERIFY_TOKENS)
        for component in self.memory.components():
            for entry in component.entries:
                buffer = self.memory.buffer(component.name, entry.layer_id)
                buffer[: component.rows_per_item] = (
                    float("nan") if buffer.is_floating_point() else -1
                )
        self._opened = 0

    def open(self, ids: Sequence[int] = ()) -> RequestTables:
        """A request, with ``ids`` computed as its prompt."""
        self._opened += 1
        tables = self.memory.open(RequestId(f"r{self._opened}"), 160)
        if ids:
            self.feed([(tables, ids)])
        return tables

    def batch(self, steps: Sequence[tuple[RequestTables, Sequence[int]]]) -> ForwardBatch:
        """Each request goes on at its ``kv_len``."""
        for tables, ids in steps:
            self.memory.extend(tables, tables.kv_len + len(ids))
        segments = [Segment(tables, tables.kv_len, tuple(ids)) for tables, ids in steps]
        return ForwardBatch.build(segments, self.memory)

    def feed(self, steps: Sequence[tuple[RequestTables, Sequence[int]]]) -> Tensor:
        """One plain forward: everything counts. Logits of all rows."""
        hidden = self.target.forward(self.batch(steps), self.memory)
        for tables, ids in steps:
            tables.kv_len += len(ids)
        return self.target.logits(hidden)

    def verify(
        self, steps: Sequence[tuple[RequestTables, Sequence[int]]], num_verify: int | None = None
    ) -> tuple[Tensor, PendingVerify]:
        """Logits of all rows, and what is to be settled; ``kv_len`` is the caller's."""
        count = len(steps) if num_verify is None else num_verify
        hidden, pending = self.target.verify(self.batch(steps), self.memory, count)
        return self.target.logits(hidden), pending

    def state(self, tables: RequestTables) -> State:
        def rows(name: str) -> Tensor:
            entries = self.memory.component(name).entries
            return torch.stack(
                [self.memory.buffer(name, e.layer_id)[tables.slot].clone() for e in entries]
            )

        return State(rows("kda.conv"), rows("kda.recurrent"), int(rows("kda.length")))
