"""Prompts that begin alike over real pods: fewer rows are computed, and nothing else changes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import pytest

from sluice.config import PoolMode
from sluice.rpc.client import PrefillClient
from sluice.types import Sampling
from tests.e2e.aggregated import Case, Outcome, run_aggregated
from tests.e2e.pods import Pair, Pod, eventually, generate

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(300)]
MODELS = Path(__file__).parents[2] / "models"
INTERVAL = 128  # and a page
# Where prompts part from the first, and what of them is known then.
PARTS = [(700, 0), (700, 640), (650, 640), (600, 512), (400, 384), (400, 384), (130, 128), (100, 0)]
CACHE = {
    "prefill_prefix_cache_bytes": str(1 << 28),
    "prefill_prefix_cache_interval_tokens": str(INTERVAL),
}


def _cases() -> list[Case]:
    rng = random.Random(11)
    beginning = [rng.randrange(3, 500) for _ in range(700)]
    cases = []
    for number, (part, _) in enumerate(PARTS):
        tail = [rng.randrange(3, 500) for _ in range(rng.randrange(40, 300))]
        warm = (0.0, 0.8)[number % 2]
        sampling = Sampling(max_tokens=16, temperature=warm, seed=number, ignore_eos=True)
        cases.append(Case((*beginning[:part], *tail), sampling))
    return cases


async def _run(pair: Pair, case: Case) -> tuple[Outcome, int]:
    answer = await generate(pair, case.prompt, case.sampling, timeout_s=60.0)
    assert answer.finished is not None
    outcome = Outcome(tuple(answer.token_ids), tuple(answer.accepted), answer.finished.reason.value)
    return outcome, answer.finished.usage.cached_tokens


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        ("tiny-dsv4", PoolMode.PAGED),
        ("tiny-dsv4", PoolMode.UNIFIED),
        ("tiny-kimi", PoolMode.PAGED),
    ],
)
def test_a_reused_beginning_is_handed_over_whole(
    tmp_path: Path, model: str, mode: PoolMode
) -> None:
    """One after the other to see what is reused, then all at once while state is being read; few pages,
    so that later prompts push earlier ones out.
    """
    cases = _cases()
    expected = asyncio.run(run_aggregated(MODELS / model, cases, mode=mode))
    pair = Pair.create(
        tmp_path,
        MODELS / model,
        pool_mode=mode.value,
        debug_fill="nan",
        max_batch_tokens="300",
        prefill_num_pages="24",
        prefill_metrics_listen="127.0.0.1:0",
        **CACHE,
    )

    async def run() -> None:
        await pair.ready()
        for case, want, (_, cached) in zip(cases, expected, PARTS, strict=True):
            assert await _run(pair, case) == (want, cached)
        found = await asyncio.gather(*(_run(pair, case) for case in cases))
        assert [outcome for outcome, _ in found] == expected
        assert all(cached > 0 for _, cached in found[1:5])
        await pair.baseline()
        async with PrefillClient(pair.prefill.address) as client:
            pages = (await client.get_status(2.0)).pools[0]
        assert 0 < pages.cached <= pages.total
        kept = pair.prefill.scrape()["sluice_prefill_prefix_cache_bytes{}"]
        assert 0 < kept <= int(CACHE["prefill_prefix_cache_bytes"])

    pair.start()
    try:
        asyncio.run(run())
    finally:
        pair.kill()


def test_clients_see_how_much_was_cached(tmp_path: Path, model_dir: Path) -> None:
    pair = Pair.create(tmp_path, model_dir, **CACHE)
    settings = {"model_dir": str(model_dir), "decodes": pair.decode.address}
    router = Pod("router", settings, tmp_path / "router.log")
    shared = "The same long instructions come first, whoever asks. " * 40
    body = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}

    async def run() -> None:
        await pair.ready()
        async with httpx.AsyncClient(
            base_url=f"http://{router.address}", trust_env=False, timeout=60
        ) as http:

            async def ask(question: str) -> tuple[str, dict[str, int]]:
                answer = await http.post("/v1/completions", json=body | {"prompt": question})
                assert answer.status_code == 200, answer.text
                usage = answer.json()["usage"]
                return answer.json()["choices"][0]["text"], usage["prompt_tokens_details"] | usage

            async def up() -> bool:
                try:
                    return (await http.get("/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(up, 30, "the router is ready")
            first, cold = await ask(shared + "Why?")
            again, warm = await ask(shared + "Why?")
            assert again == first
            assert cold["cached_tokens"] == 0
            assert warm["cached_tokens"] >= INTERVAL
            assert warm["cached_tokens"] > warm["prompt_tokens"] - 2 * INTERVAL
            _, other = await ask(shared + "And who else wants to know?")
            assert other["cached_tokens"] >= INTERVAL

    pair.start()
    router.start()
    try:
        asyncio.run(run())
    finally:
        router.kill()
        pair.kill()
