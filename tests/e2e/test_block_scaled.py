"""mxfp8 pods over real NIXL: values and scales move like any component, and lost ones are missed by name."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from sluice.config import EngineConfig, PoolConfig, SpecConfig
from sluice.engine.build import build_engine
from sluice.rpc.client import DecodeClient
from sluice.types import Request, RequestId, Role, Sampling
from tests.e2e.pods import START_TIMEOUT_S, Pair, eventually, generate
from tests.e2e.test_digests import flips_are_named
from tests.unit.engine.driving import run_all

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(300)]
MXFP8 = "mxfp8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 whose heads are one block wide."""
    from tests.parity.llama_oracle import VARIANTS, save_oracle

    config_class, model_class, settings = VARIANTS["qwen3"]
    path = tmp_path_factory.mktemp("qwen3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VARIANTS, "blocks", (config_class, model_class, settings | {"head_dim": 32}))
        save_oracle("blocks", path)
    return path


def requests() -> list[Request]:
    rng = random.Random(3)
    return [
        Request(
            RequestId(f"r{length}"),
            tuple(rng.randrange(3, 64) for _ in range(length)),
            Sampling(max_tokens=12, temperature=0.9 * (length % 2), seed=length, ignore_eos=True),
        )
        for length in (1, 2, 31, 64, 127, 128, 129, 200)
    ]


def test_disaggregated_equals_aggregated(tmp_path: Path, folder: Path) -> None:
    pool = PoolConfig(kv_dtype=MXFP8)
    core = build_engine(folder, Role.AGGREGATED, pool, SpecConfig(0), EngineConfig())
    expected = run_all(core, requests())
    pair = Pair.create(
        tmp_path, folder, kv_dtype=MXFP8, spec_steps="0", debug_fill="nan", max_batch_tokens="50"
    )

    async def run() -> list[list[int]]:
        await pair.ready()
        asked = [generate(pair, one.prompt, one.sampling, timeout_s=60.0) for one in requests()]
        answers = await asyncio.gather(*asked)
        await pair.baseline()
        return [answer.token_ids for answer in answers]

    pair.start()
    try:
        assert asyncio.run(run()) == [expected[one.request_id].tokens for one in requests()]
    finally:
        pair.kill()


def test_a_flipped_bit_in_values_or_scales_fails_the_request_and_only_it(
    tmp_path: Path, folder: Path
) -> None:
    pair = Pair.create(tmp_path, folder, kv_dtype=MXFP8, spec_steps="0")

    async def run() -> None:
        await pair.ready()
        await flips_are_named(pair, requests()[-1].prompt, ("target.kv", "target.kv.scale"))

    pair.start()
    try:
        asyncio.run(run())
    finally:
        pair.kill()


def test_a_pair_that_loses_scales_never_becomes_ready(tmp_path: Path, folder: Path) -> None:
    """The canary moves every component before anybody's request does, and names the one that is short."""
    pair = Pair.create(
        tmp_path, folder, kv_dtype=MXFP8, spec_steps="0", prefill_fault_withhold="target.kv.scale"
    )

    async def run() -> None:
        async with DecodeClient(pair.decode.address) as client:

            async def look() -> bool:
                status = await client.get_status(2.0)
                assert not status.ready
                return "target.kv.scale: 0 rows were sent" in status.reason

            await eventually(look, START_TIMEOUT_S, "scales missed by name")

    pair.start()
    try:
        asyncio.run(run())
    finally:
        pair.kill()
