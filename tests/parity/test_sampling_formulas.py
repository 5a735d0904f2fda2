"""What shapes logits, and what logprobs are, against transformers' own processors and models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV4ForCausalLM, KimiLinearForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sluice.config import EngineConfig, PoolConfig
from sluice.engine.build import build_engine
from sluice.spec.distribution import distribution
from sluice.spec.steering import Steering
from sluice.types import Request, RequestId, Role, Sampling
from tests.unit.engine.driving import run_all

MODELS = Path(__file__).parents[2] / "models"
VOCAB = 50
PROMPT, OUTPUT = (3, 7, 7, 12, 40), (9, 3, 9, 21)
STOPS = (5, 6)


def _logits() -> Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4)) * 3


@pytest.mark.parametrize(
    ("sampling", "processor"),
    [
        (Sampling(repetition_penalty=1.7), RepetitionPenaltyLogitsProcessor(1.7)),
        (Sampling(repetition_penalty=0.6), RepetitionPenaltyLogitsProcessor(0.6)),
        (
            Sampling(logit_bias=((4, 2.5), (30, -7.0))),
            SequenceBiasLogitsProcessor([[[4], 2.5], [[30], -7.0]]),
        ),
        (
            Sampling(min_tokens=5),
            MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, list(STOPS)),
        ),
        (
            Sampling(min_tokens=4),
            MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, list(STOPS)),
        ),
    ],
)
def test_steering_is_what_transformers_does(sampling: Sampling, processor: LogitsProcessor) -> None:
    steered = Steering(sampling, PROMPT, OUTPUT, frozenset(STOPS)).steer(_logits(), ())
    assert torch.equal(steered, processor(torch.tensor([[*PROMPT, *OUTPUT]]), _logits()))


@pytest.mark.parametrize(
    ("sampling", "warpers"),
    [
        (Sampling(min_p=0.05), [MinPLogitsWarper(0.05)]),
        (Sampling(min_p=0.5), [MinPLogitsWarper(0.5)]),
        (
            Sampling(temperature=0.6, min_p=0.01, top_k=12, top_p=0.8),
            [
                TemperatureLogitsWarper(0.6),
                MinPLogitsWarper(0.01),
                TopKLogitsWarper(12),
                TopPLogitsWarper(0.8),
            ],
        ),
    ],
)
def test_a_distribution_is_what_transformers_warpers_leave(
    sampling: Sampling, warpers: Sequence[LogitsProcessor]
) -> None:
    chosen = Sampling(
        temperature=sampling.temperature or 1.0,
        min_p=sampling.min_p,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )
    scores = _logits()
    for warp in warpers:
        scores = warp(torch.tensor([[*PROMPT, *OUTPUT]]), scores)
    expected = torch.softmax(scores.double(), -1)
    assert torch.allclose(distribution(_logits(), [chosen]), expected, atol=1e-7)


@pytest.mark.parametrize(
    ("folder", "loader"),
    [("tiny-dsv4", DeepseekV4ForCausalLM), ("tiny-kimi", KimiLinearForCausalLM)],
)
def test_logprobs_are_log_softmax_of_the_models_logits(
    folder: str, loader: type[AutoModelForCausalLM]
) -> None:
    """Prompt and answer, with the shipped draft, in chunks; sampled and steered, which changes no logprob."""
    torch.set_num_threads(1)
    sampling = Sampling(
        max_tokens=12,
        temperature=0.9,
        seed=3,
        frequency_penalty=0.5,
        ignore_eos=True,
        logprobs=5,
        prompt_logprobs=5,
    )
    generator = torch.Generator().manual_seed(8)
    prompt = tuple(torch.randint(3, 500, (90,), generator=generator).tolist())
    core = build_engine(
        MODELS / folder, Role.AGGREGATED, PoolConfig(), None, EngineConfig(max_batch_tokens=33)
    )
    story = run_all(core, [Request(RequestId("r"), prompt, sampling)])[RequestId("r")]
    model = loader.from_pretrained(
        MODELS / folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.tensor([[*prompt, *story.tokens]])
    with torch.no_grad():
        expected = torch.log_softmax(model(ids, use_cache=False).logits[0], -1)
    assert story.prompt_logprobs is not None
    assert any(accepted for accepted in story.accepted)
    got = [*story.prompt_logprobs[1:], *story.logprobs]
    assert len(got) == ids.shape[1] - 1
    for row, entry in enumerate(got):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(expected[row, ids[0, row + 1]]), abs=2e-3)
        best = expected[row].topk(5).values.tolist()
        assert [candidate.logprob for candidate in entry.top] == pytest.approx(best, abs=2e-3)
