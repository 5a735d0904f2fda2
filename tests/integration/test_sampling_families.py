"""Every sampling feature on the shipped models: their drafts change no greedy answer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from sluice.config import EngineConfig, PoolConfig, SpecConfig
from sluice.engine.build import build_engine
from sluice.types import Request, RequestId, Role, Sampling
from tests.e2e.test_sampling import FEATURES
from tests.unit.engine.driving import Story, run_all

MODELS = Path(__file__).parents[2] / "models"


def _requests() -> list[Request]:
    rng = random.Random(11)
    requests = []
    for number, feature in enumerate(FEATURES):
        sampling = Sampling(**{"max_tokens": 24, **feature})  # type: ignore[arg-type]
        prompt = tuple(rng.randrange(3, 500) for _ in range(rng.choice([1, 30, 130])))
        requests.append(Request(RequestId(f"r{number}"), prompt, sampling))
    return requests


def _stories(model: str, steps: int | None) -> dict[RequestId, Story]:
    spec = None if steps is None else SpecConfig(steps)
    pool = PoolConfig(num_pages=64, num_window_pages=40, num_slots=16)
    config = EngineConfig(max_batch_tokens=64)
    core = build_engine(MODELS / model, Role.AGGREGATED, pool, spec, config)
    return run_all(core, _requests())


@pytest.mark.parametrize("model", ["tiny-dsv4", "tiny-kimi"])
def test_greedy_with_the_shipped_draft_says_what_it_says_without(model: str) -> None:
    torch.set_num_threads(1)
    plain, drafted = _stories(model, 0), _stories(model, None)
    assert sum(count or 0 for story in drafted.values() for count in story.accepted) > 10
    for name, story in plain.items():
        assert story.error is None
        assert (drafted[name].tokens, drafted[name].finish) == (story.tokens, story.finish), name
        for mine, theirs in zip(drafted[name].logprobs, story.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
