"""The oracle: the same engine doing both roles in one process, no transfer anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.config import EngineConfig, PoolConfig, PoolMode, SpecConfig
from sluice.engine.build import build_engine
from sluice.engine.facade import EngineFacade
from sluice.types import Logprobs, PromptLogprobs, Request, RequestId, Role, Sampling


@dataclass(frozen=True)
class Case:
    """One prompt and how to continue it."""

    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Outcome:
    """Everything that must be equal in both modes."""

    token_ids: tuple[int, ...]
    accepted: tuple[int | None, ...]
    reason: str
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None


async def run_aggregated(
    model_dir: Path,
    cases: Sequence[Case],
    *,
    mode: PoolMode = PoolMode.PAGED,
    spec_steps: int | None = None,
    max_batch_tokens: int = 512,
) -> list[Outcome]:
    """One request after the other: nothing is batched, nothing can mix."""
    core = build_engine(
        model_dir,
        Role.AGGREGATED,
        PoolConfig(mode=mode),
        None if spec_steps is None else SpecConfig(spec_steps),
        EngineConfig(max_batch_tokens=max_batch_tokens),
        dtype="float32",
    )
    engine = EngineFacade(core)
    await engine.start()
    try:
        return [await _one(engine, number, case) for number, case in enumerate(cases)]
    finally:
        await engine.stop()


async def _one(engine: EngineFacade, number: int, case: Case) -> Outcome:
    tokens: list[int] = []
    accepted: list[int | None] = []
    reason = ""
    logprobs: list[Logprobs] = []
    scores: PromptLogprobs | None = None
    async for event in engine.generate(
        Request(RequestId(f"oracle-{number}"), case.prompt, case.sampling)
    ):
        tokens += event.token_ids
        accepted.append(event.accepted_drafts)
        reason = event.finish_reason.value if event.finish_reason else reason
        logprobs += event.logprobs
        scores = event.prompt_logprobs or scores
    return Outcome(tuple(tokens), tuple(accepted), reason, tuple(logprobs), scores)
