"""Many streams at once through router, decode and prefill: every text checked, memory watched.

``python -m bench.load`` (``make bench-load``) starts 1P1D and a router on the shipped model and runs two closed loops:
200 long streams at once, then 5,000 short requests. Each text must equal the one the same prompt had when it was
alone: a lost, doubled or mixed-up chunk shows. Resident memory of the three processes is read while they run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from tests.e2e.fleet import Outcome, stream
from tests.e2e.pods import Pair, Pod, eventually

MODEL = Path(__file__).parents[1] / "models" / "tiny-dsv4"
PROMPTS = [f"In the {n}th year of the reign of king number {n * 7}" for n in range(3, 19)]
_SAMPLE_S = 1.0


@dataclass(frozen=True)
class Round:
    """``num_requests`` streams of ``max_tokens``, at most ``at_once`` of them open."""

    name: str
    num_requests: int
    at_once: int
    max_tokens: int


@dataclass
class Memory:
    """Resident bytes of the processes by role, in order of time."""

    samples: dict[str, list[int]] = field(default_factory=dict)

    async def watch(self, pods: Sequence[Pod]) -> None:
        processes = {pod.role: psutil.Process(pod.pid) for pod in pods}
        while True:
            for role, process in processes.items():
                self.samples.setdefault(role, []).append(process.memory_info().rss)
            await asyncio.sleep(_SAMPLE_S)

    def line(self, role: str) -> str:
        """MiB after the first tenth, at the half, at the end: flat means that the last two are equal."""
        seen = self.samples[role]
        places = (len(seen) // 10, len(seen) // 2, len(seen) - 1)
        return " | ".join(f"{seen[place] / 2**20:.0f}" for place in places)


@dataclass(frozen=True)
class Result:
    round: Round
    seconds: float
    outcomes: list[Outcome]
    wrong: int
    memory: Memory

    @property
    def errors(self) -> int:
        return sum(not outcome.good for outcome in self.outcomes)


async def run_round(http: httpx.AsyncClient, pods: Sequence[Pod], plan: Round) -> Result:
    """One closed loop."""
    alone = [await stream(http, prompt, plan.max_tokens) for prompt in PROMPTS]
    prompts = iter(range(plan.num_requests))
    outcomes: list[Outcome] = []
    wrong = 0
    memory = Memory()

    async def worker() -> None:
        nonlocal wrong
        for number in prompts:
            which = number % len(PROMPTS)
            outcome = await stream(http, PROMPTS[which], plan.max_tokens, timeout_s=600)
            outcomes.append(outcome)
            wrong += outcome.good and outcome.text != alone[which].text

    watch = asyncio.create_task(memory.watch(pods))
    began = time.monotonic()
    await asyncio.gather(*(worker() for _ in range(plan.at_once)))
    seconds = time.monotonic() - began
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    return Result(plan, seconds, outcomes, wrong, memory)


def report(result: Result) -> str:
    plan, seconds = result.round, result.seconds
    times = sorted(outcome.seconds for outcome in result.outcomes)
    lines = [
        f"{plan.name}: {plan.num_requests} requests of {plan.max_tokens} tokens, {plan.at_once} at once",
        f"  {seconds:.0f} s, {plan.num_requests / seconds:.1f} requests/s, "
        f"{plan.num_requests * plan.max_tokens / seconds:.0f} tokens/s",
        f"  a request took {statistics.median(times):.2f} s (median), "
        f"{times[int(len(times) * 0.99)]:.2f} s (p99)",
        f"  errors {result.errors}, texts that differ {result.wrong}",
        "  resident MiB after 10 % | 50 % | 100 % of the time:",
    ]
    lines += [f"    {role}: {result.memory.line(role)}" for role in result.memory.samples]
    return "\n".join(lines)


async def main(rounds: Sequence[Round], folder: Path) -> int:
    most = max(plan.at_once for plan in rounds)
    room = {
        "max_running": str(most),
        "num_window_pages": str(most * 8),
        "num_slots": str(most * 2),
        "max_queue": str(most),
    }
    pair = Pair.create(folder / "pair", MODEL, **room)
    settings = {"model_dir": str(MODEL), "decodes": pair.decode.address}
    router = Pod("router", settings, folder / "router.log")
    pods = [pair.prefill, pair.decode, router]
    failed = 0
    try:
        for pod in pods:
            pod.start()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=f"http://{router.address}", trust_env=False, timeout=600, limits=limits
        ) as http:
            await eventually(lambda: _ready(http), 120.0, "ready", every_s=0.5)
            for plan in rounds:
                result = await run_round(http, pods, plan)
                failed += result.errors + result.wrong
                print(report(result), flush=True)
        await pair.baseline()
        print("pools of both pods at baseline")
    finally:
        for pod in pods:
            if pod.alive():
                pod.stop()
    return 1 if failed else 0


async def _ready(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/ready")).status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--requests", type=int, default=5000)
    args = parser.parse_args()
    plans = [
        Round("streams", args.streams, args.streams, 64),
        Round("soak", args.requests, 32, 8),
    ]
    with tempfile.TemporaryDirectory() as name:
        raise SystemExit(asyncio.run(main(plans, Path(name))))
