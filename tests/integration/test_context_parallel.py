"""A Kimi Linear whose latents are dealt to 2 and 4 ranks gives the tokens of one, around every page's end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sluice.config import EngineConfig, PoolConfig, SpecConfig
from sluice.engine.build import build_engine
from sluice.engine.core import EngineCore
from sluice.engine.ranks import LeadingCore
from sluice.errors import ConfigError
from sluice.parallel.context import NO_CONTEXT, ContextParallel
from sluice.parallel.group import SINGLE, Parallel
from sluice.types import Request, RequestId, Role, Sampling
from tests.integration.tiny_folders import FAMILIES, save_tiny
from tests.unit.engine.driving import Story, run_all
from tests.unit.parallel.ranks import run_contexts

MODELS = Path(__file__).parents[2] / "models"
PAGE = 4
# Every length up to 3 pages of all ranks together and one more, for 2 and for 4 ranks.
LENGTHS = range(1, 3 * PAGE * 4 + 2)


def _requests() -> list[Request]:
    generator = torch.Generator().manual_seed(7)
    return [
        Request(
            RequestId(f"r{length}"),
            tuple(torch.randint(3, 500, (length,), generator=generator).tolist()),
            Sampling(max_tokens=7, temperature=0.8 * (length % 2), seed=length, ignore_eos=True),
        )
        for length in LENGTHS
    ]


def _core(
    steps: int | None, parallel: Parallel = SINGLE, context: ContextParallel = NO_CONTEXT
) -> EngineCore:
    pool = PoolConfig(page_tokens=PAGE, num_pages=900, num_slots=len(LENGTHS), fill="nan")
    spec = None if steps is None else SpecConfig(steps)
    config = EngineConfig(max_batch_tokens=100, max_running=len(LENGTHS))
    core = build_engine(
        MODELS / "tiny-kimi",
        Role.AGGREGATED,
        pool,
        spec,
        config,
        parallel=parallel,
        context=context,
    )
    if isinstance(core, LeadingCore):
        core.lead(lambda _turn: None)
    return core


@pytest.fixture(scope="module", params=[None, 0], ids=["dspark", "plain"])
def steps(request: pytest.FixtureRequest) -> int | None:
    return None if request.param is None else int(request.param)


@pytest.fixture(scope="module")
def expected(steps: int | None) -> dict[RequestId, Story]:
    return run_all(_core(steps), _requests())


@pytest.mark.parametrize("replicate_q", [False, True], ids=["gathered-q", "replicated-q"])
@pytest.mark.parametrize(("ranks", "context"), [(2, 2), (4, 4), (4, 2)])
def test_the_tokens_of_one_rank(
    steps: int | None,
    expected: dict[RequestId, Story],
    ranks: int,
    context: int,
    replicate_q: bool,
) -> None:
    def work(parallel: Parallel, group: Parallel) -> dict[RequestId, Story]:
        core = _core(steps, parallel, ContextParallel(group, replicate_q))
        layout = core.layout()
        assert layout.component("target.mla").interleave == context
        assert layout.component("target.mla").rows_per_item == PAGE * context
        return run_all(core, _requests())

    for rank, told in enumerate(run_contexts(ranks, context, work)):
        assert told == expected, f"rank {rank}"


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "tiny-kimi"])
def test_a_family_without_latents_is_refused(family: str, tmp_path: Path) -> None:
    """The pairs with a DCP above 1 that mean nothing."""
    folder = save_tiny(family, tmp_path / family)

    def work(parallel: Parallel, group: Parallel) -> EngineCore:
        return build_engine(
            folder,
            Role.DECODE,
            PoolConfig(num_pages=4, num_window_pages=4),
            None,
            EngineConfig(),
            parallel=parallel,
            context=ContextParallel(group),
        )

    with pytest.raises(ConfigError, match="context parallelism of 2 ranks"):
        run_contexts(2, 2, work)
