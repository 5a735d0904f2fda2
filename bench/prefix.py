"""Time to a prompt's first token on a prefill engine, cold and behind a kept beginning.

python -m bench.prefix --prompts 1024,2048 --models models/tiny-dsv4,models/tiny-kimi

CPU seconds of one thread, medians: the work itself, whatever else the machine does. Writes
``bench/results/prefix.md``.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sluice.config import EngineConfig, PoolConfig, PoolMode, SpecConfig
from sluice.engine.core import EngineCore
from sluice.engine.outputs import Prefilled
from sluice.models.registry import LoadedModel, load_model
from sluice.pools.memory import build_memory
from sluice.spec.build import own_steps
from sluice.types import Request, RequestId, Role, Sampling

RESULTS = Path(__file__).parent / "results" / "prefix.md"
INTERVAL, TAIL, ROUNDS = 128, 64, 3


@dataclass(frozen=True)
class Measured:
    """Milliseconds of CPU to the first token; ``keeping`` is cold, with the state kept on the way."""

    model: str
    mode: PoolMode
    prompt_tokens: int
    cached_tokens: int
    cold_ms: float
    keeping_ms: float
    warm_ms: float
    kept_bytes: int

    def row(self) -> str:
        cells = (
            self.model,
            self.mode.value,
            str(self.prompt_tokens),
            str(self.cached_tokens),
            f"{self.cold_ms:.0f}",
            f"{self.keeping_ms:.0f}",
            f"{self.warm_ms:.0f}",
            f"{self.cold_ms / self.warm_ms:.1f}",
            f"{self.kept_bytes / 1024:.0f}",
        )
        return f"| {' | '.join(cells)} |"


HEADER = (
    "| model | pools | prompt | of it cached | cold ms | cold, keeping ms | warm ms | cold / warm "
    "| kept KB |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def engine(model: LoadedModel, mode: PoolMode, prefix_bytes: int) -> EngineCore:
    spec = SpecConfig(own_steps(model.draft))
    pool = PoolConfig(mode=mode, num_pages=128, num_window_pages=64, num_slots=4)
    needs = model.target.state_needs(pool.kv_dtype)
    if model.draft is not None:
        needs += model.draft.state_needs(pool.kv_dtype)
    memory = build_memory(needs, pool, spec.verify_tokens)
    config = EngineConfig(prefix_bytes=prefix_bytes, prefix_interval_tokens=INTERVAL)
    return EngineCore(Role.PREFILL, model.target, model.draft, memory, spec, config, pool)


def first_token_ms(core: EngineCore, name: str, prompt: Sequence[int]) -> tuple[float, int]:
    """CPU milliseconds from the request to its first token, and how many tokens were cached."""
    request = Request(RequestId(name), tuple(prompt), Sampling(max_tokens=1))
    began = time.process_time()
    core.submit(request, lambda chunk: None)
    while core.step():
        pass
    spent_ms = (time.process_time() - began) * 1e3
    (done,) = core.drain()
    assert isinstance(done, Prefilled), done
    core.release(request.request_id)
    return spent_ms, done.outcome.cached_tokens


def measure(name: str, model: LoadedModel, mode: PoolMode, prompt_tokens: int) -> Measured:
    """Every round its own beginning; the warm prompt has another end."""
    rng = random.Random(prompt_tokens)
    off, on = engine(model, mode, 0), engine(model, mode, 1 << 30)
    cold, keeping, warm, cached, kept = [], [], [], 0, 0

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, min(500, model.target.info.vocab_size)) for _ in range(count)]

    for number in range(ROUNDS + 1):
        shared = tokens(prompt_tokens - TAIL)
        once, again = shared + tokens(TAIL), shared + tokens(TAIL)
        before = _kept(on)
        cold.append(first_token_ms(off, f"cold-{number}", again)[0])
        keeping.append(first_token_ms(on, f"keeping-{number}", once)[0])
        kept = _kept(on) - before
        spent, cached = first_token_ms(on, f"warm-{number}", again)
        warm.append(spent)
    medians = (statistics.median(times[1:]) for times in (cold, keeping, warm))
    return Measured(name, mode, prompt_tokens, cached, *medians, kept)


def _kept(core: EngineCore) -> int:
    return core.stats().prefix_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="models/tiny-dsv4,models/tiny-kimi")
    parser.add_argument("--prompts", default="512,1024,2048")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [HEADER]
    print(HEADER)
    for folder in map(Path, options.models.split(",")):
        model = load_model(folder)
        for mode in PoolMode if "dsv4" in folder.name else (PoolMode.PAGED,):
            for prompt_tokens in map(int, options.prompts.split(",")):
                lines.append(measure(folder.name, model, mode, prompt_tokens).row())
                print(lines[-1], flush=True)
    RESULTS.write_text(
        f"Made by `make bench-prefix`: medians of {ROUNDS} rounds, CPU milliseconds of one thread. "
        f"Prompts differ in their last {TAIL} tokens; depths every {INTERVAL} tokens.\n\n"
        + "\n".join(lines)
        + "\n"
    )


if __name__ == "__main__":
    main()
