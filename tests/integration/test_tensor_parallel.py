"""Engines of 2 and 4 ranks give the tokens of one, for every family, with drafts and without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sluice.config import EngineConfig, PoolConfig, SpecConfig
from sluice.engine.build import build_engine
from sluice.engine.core import EngineCore
from sluice.engine.ranks import LeadingCore
from sluice.models.base import ForwardBatch, Segment
from sluice.models.config_fields import ConfigFields
from sluice.models.llama.config import parse_config
from sluice.models.llama.weights import read_weights
from sluice.models.registry import load_model
from sluice.parallel.group import Parallel
from sluice.pools.memory import build_memory
from sluice.types import Request, RequestId, Role, Sampling
from tests.unit.engine.driving import Story, run_all
from tests.unit.models.dspark.tiny import Tensors
from tests.unit.parallel.ranks import run_ranks

SHIPPED = Path(__file__).parents[2] / "models"
FAMILIES = ("tiny-dsv4", "tiny-kimi", "qwen3")
POOL = PoolConfig(page_tokens=128, num_pages=12, num_window_pages=12, num_slots=6, fill="nan")
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_bias": True,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with fewer key/value heads than ranks, biases and tied tables."""
    folder = tmp_path_factory.mktemp("qwen3")
    (folder / "config.json").write_text(json.dumps(QWEN3))
    source = Tensors(0)
    read_weights(source, parse_config(ConfigFields(QWEN3)))
    save_file(source.made, folder / "model.safetensors")
    return folder


def _folder(family: str, qwen3: Path) -> Path:
    return qwen3 if family == "qwen3" else SHIPPED / family


def _requests(vocab: int) -> list[Request]:
    """Greedy and sampled, shorter and longer than a page, a window and a few chunks."""
    generator = torch.Generator().manual_seed(3)
    return [
        Request(
            RequestId(f"r{length}"),
            tuple(torch.randint(3, vocab, (length,), generator=generator).tolist()),
            Sampling(max_tokens=8, temperature=0.8 * (length % 2), seed=length, ignore_eos=True),
        )
        for length in (2, 33, 130)
    ]


def _core(folder: Path, steps: int | None, parallel: Parallel) -> EngineCore:
    spec = None if steps is None else SpecConfig(steps)
    config = EngineConfig(max_batch_tokens=64)
    core = build_engine(folder, Role.AGGREGATED, POOL, spec, config, parallel=parallel)
    if isinstance(core, LeadingCore):
        core.lead(lambda _turn: None)  # the test itself tells every rank
    return core


def _stories(folder: Path, steps: int | None, size: int) -> Sequence[dict[RequestId, Story]]:
    def work(parallel: Parallel) -> dict[RequestId, Story]:
        core = _core(folder, steps, parallel)
        told = run_all(core, _requests(core.info.vocab_size))
        assert core.memory.at_baseline()
        return told

    return run_ranks(size, work)


@pytest.mark.parametrize("steps", [None, 0], ids=["drafting", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_one_rank(family: str, steps: int | None, qwen3: Path) -> None:
    folder = _folder(family, qwen3)
    (expected,) = _stories(folder, steps, 1)
    for size in (2, 4):
        for rank, told in enumerate(_stories(folder, steps, size)):
            assert told == expected, f"rank {rank} of {size}"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_of_one_rank(family: str, qwen3: Path) -> None:
    folder, ids = _folder(family, qwen3), tuple(range(3, 43))

    def work(parallel: Parallel) -> torch.Tensor:
        target = load_model(folder, draft=False, parallel=parallel).target
        memory = build_memory(target.state_needs("float32"), POOL, 1)
        tables = memory.open(RequestId("r"), len(ids))
        memory.extend(tables, len(ids))
        batch = ForwardBatch.build([Segment(tables, 0, ids)], memory)
        return target.logits(target.forward(batch, memory))

    (expected,) = run_ranks(1, work)
    for size in (2, 4):
        first, *others = run_ranks(size, work)
        torch.testing.assert_close(first, expected, rtol=0, atol=1e-4)
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_of_one_model_share_its_identity(family: str, qwen3: Path) -> None:
    """Digests are of the whole checkpoint, of which no rank reads all."""
    folder = _folder(family, qwen3)
    (expected,) = run_ranks(1, lambda parallel: load_model(folder, parallel=parallel).target.info)
    assert run_ranks(2, lambda p: load_model(folder, parallel=p).target.info) == [expected] * 2


def test_a_width_that_does_not_divide_is_refused(qwen3: Path) -> None:
    with pytest.raises(Exception, match="can't be shared equally by 3"):
        run_ranks(3, lambda parallel: load_model(qwen3, parallel=parallel))
