"""Steps and tokens a second of one aggregated engine, and which share of a step is not the model.

python -m bench.engine --model models/tiny-dsv4 --batches 1,4,8
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sluice.config import EngineConfig, PoolConfig, PoolMode, SpecConfig
from sluice.engine.core import EngineCore
from sluice.models.base import DraftModel, ForwardBatch, ModelInfo, TargetModel
from sluice.models.registry import LoadedModel, load_model
from sluice.pools.base import BufferSpec, StateMemory
from sluice.pools.memory import build_memory
from sluice.types import Request, RequestId, Role, Sampling, TokenEvent


class Clock:
    """Time spent inside model calls."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.spent_s += time.process_time() - self._began_s


@dataclass
class TimedTarget:
    """A target whose calls run on a clock."""

    inner: TargetModel
    clock: Clock

    @property
    def info(self) -> ModelInfo:
        return self.inner.info

    def state_needs(self, kv_dtype: str) -> tuple[BufferSpec, ...]:
        return self.inner.state_needs(kv_dtype)

    def forward(self, batch: ForwardBatch, memory: StateMemory) -> Tensor:
        with self.clock:
            return self.inner.forward(batch, memory)

    def logits(self, hidden: Tensor) -> Tensor:
        with self.clock:
            return self.inner.logits(hidden)


@dataclass
class TimedDraft:
    """A draft whose calls run on a clock."""

    inner: DraftModel
    clock: Clock

    def state_needs(self, kv_dtype: str) -> tuple[BufferSpec, ...]:
        return self.inner.state_needs(kv_dtype)

    def forward(self, batch: ForwardBatch, hidden: Tensor, memory: StateMemory) -> Tensor:
        with self.clock:
            return self.inner.forward(batch, hidden, memory)

    def logits(self, hidden: Tensor) -> Tensor:
        with self.clock:
            return self.inner.logits(hidden)


@dataclass(frozen=True)
class Measured:
    """CPU time of the step thread, so that neighbours on the same cores don't count."""

    steps: int
    tokens: int
    cpu_s: float
    model_s: float

    def row(self) -> str:
        return (
            f"{self.cpu_s / self.steps * 1e3:9.1f} {self.steps / self.cpu_s:9.1f} "
            f"{self.tokens / self.cpu_s:9.1f} {self.tokens / self.steps:11.2f} "
            f"{(1 - self.model_s / self.cpu_s) * 100:9.1f}%"
        )


def measure(
    model: LoadedModel, mode: PoolMode, steps: int, batch: int, prompt_tokens: int, new_tokens: int
) -> Measured:
    """Decode ``batch`` requests together; prompts are done before the clock starts."""
    clock = Clock()
    target = TimedTarget(model.target, clock)
    draft = TimedDraft(model.draft, clock) if model.draft is not None and steps else None
    spec, pool = SpecConfig(steps), PoolConfig(mode=mode, num_slots=batch)
    needs = target.state_needs(pool.kv_dtype) + (draft.state_needs(pool.kv_dtype) if draft else ())
    memory = build_memory(needs, pool, spec.verify_tokens)
    config = EngineConfig(max_batch_tokens=batch * prompt_tokens, max_running=batch)
    core = EngineCore(Role.AGGREGATED, target, draft, memory, spec, config, pool)
    sampling = Sampling(max_tokens=new_tokens, ignore_eos=True)
    for i in range(batch):
        generator = torch.Generator().manual_seed(i)
        pattern = torch.randint(3, target.info.vocab_size, (9,), generator=generator).tolist()
        prompt = tuple((pattern * (prompt_tokens // 9 + 1))[:prompt_tokens])
        core.submit(Request(RequestId(str(i)), prompt, sampling))
    core.step()
    core.drain()
    clock.spent_s, began_s, done = 0.0, time.process_time(), 0
    while core.step():
        done += 1
    cpu_s = time.process_time() - began_s
    tokens = sum(len(o.token_ids) for o in core.drain() if isinstance(o, TokenEvent))
    return Measured(done, tokens, cpu_s, clock.spent_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/tiny-dsv4"))
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(options.model)
    print("mode     steps batch   ms/step   steps/s  tokens/s tokens/step not model   (CPU time)")
    for mode in PoolMode:
        for steps in (0, 3):
            for batch in map(int, options.batches.split(",")):
                measured = measure(
                    model, mode, steps, batch, options.prompt_tokens, options.new_tokens
                )
                print(f"{mode.value:8} {steps:5} {batch:5} {measured.row()}", flush=True)


if __name__ == "__main__":
    main()
