"""Acceptance length by decode position, with the draft's window received and with it withheld, in one run.

``python -m bench.acceptance`` (``make bench-acceptance``) starts a real pair for each pool mode and variant, sends
the same held-out prompts and writes a table, a JSON file and a plot. The withheld variant is the fault that this
project exists for: the draft component is silently not sent, outputs stay right, and only acceptance shows it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from sluice.config import PoolMode
from sluice.types import Sampling
from tests.e2e.pods import Answer, Pair, generate

ROOT = Path(__file__).parents[1]
DRAFT_WINDOW = {PoolMode.PAGED: "draft.swa", PoolMode.UNIFIED: "draft.swa_ring"}
CONCURRENCY = 4


@dataclass(frozen=True)
class Step:
    """One verify step: how many tokens had been emitted before it, and how many it emitted at most."""

    position: int
    emitted: int  # accepted drafts + 1


@dataclass(frozen=True)
class Variant:
    """What one pair did with all prompts."""

    mode: str
    draft: str  # "received" or "withheld"
    outputs: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]


def acceptance_length(steps: Sequence[Step], first: int = 0, last: int = 1 << 30) -> float:
    """Mean tokens a verify step emits, over steps that start at positions ``first <= p < last``."""
    chosen = [step.emitted for step in steps if first <= step.position < last]
    return sum(chosen) / len(chosen) if chosen else float("nan")


def steps_of(answer: Answer) -> list[Step]:
    """The first message is prefill's token; every later one is a verify step of ``accepted + 1`` tokens."""
    steps, position = [], 1
    for accepted in answer.accepted[1:]:
        emitted = 1 if accepted is None else accepted + 1
        steps.append(Step(position, emitted))
        position += emitted
    return steps


def held_out_prompts(model_dir: Path, count: int, tokens: int) -> list[tuple[int, ...]]:
    """Openings of the held-out paragraphs that ship with the benchmark."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    text = (ROOT / "bench" / "held_out.txt").read_text()
    paragraphs = [tokenizer.encode(part).ids for part in text.split("\n\n") if part.strip()]
    long_enough = [tuple(ids[:tokens]) for ids in paragraphs if len(ids) >= tokens]
    if len(long_enough) < count:
        raise SystemExit(f"only {len(long_enough)} held-out paragraphs have {tokens} tokens")
    return long_enough[:count]


async def measure(
    model_dir: Path,
    mode: PoolMode,
    withheld: bool,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    folder: Path,
) -> Variant:
    """Stale rows, not zeros: the prompts run twice, and the second round finds the first one's rows."""
    settings = {"fault_withhold": DRAFT_WINDOW[mode]} if withheld else {}
    pair = Pair.create(folder, model_dir, pool_mode=mode.value, **settings)
    pair.start()
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(prompt: tuple[int, ...], seed: int) -> Answer:
        chosen = Sampling(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=seed,
            ignore_eos=True,
        )
        async with places:
            return await generate(pair, prompt, chosen, timeout_s=300.0)

    try:
        await pair.ready()
        await asyncio.gather(*(one(prompt, 1000 + i) for i, prompt in enumerate(reversed(prompts))))
        answers = await asyncio.gather(*(one(prompt, i) for i, prompt in enumerate(prompts)))
    finally:
        pair.kill()
    return Variant(
        mode.value,
        "withheld" if withheld else "received",
        tuple(tuple(answer.token_ids) for answer in answers),
        tuple(step for answer in answers for step in steps_of(answer)),
    )


def table(variants: Sequence[Variant], edges: Sequence[int], window: int) -> str:
    rows = [
        "| pool mode | decode position | received | withheld | ratio |",
        "|---|---|---|---|---|",
    ]
    for mode in sorted({variant.mode for variant in variants}):
        pair = {v.draft: v.steps for v in variants if v.mode == mode}
        spans = [*itertools.pairwise(edges), (0, window), (0, 1 << 30)]
        for first, last in spans:
            good = acceptance_length(pair["received"], first, last)
            bad = acceptance_length(pair["withheld"], first, last)
            name = f"{first}..{last - 1}" if last < 1 << 30 else "all"
            name = f"first window ({name})" if (first, last) == (0, window) else name
            rows.append(f"| {mode} | {name} | {good:.4f} | {bad:.4f} | {good / bad:.3f} |")
    return "\n".join(rows)


def plot(variants: Sequence[Variant], edges: Sequence[int], window: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    modes = sorted({variant.mode for variant in variants})
    figure, axes = pyplot.subplots(1, len(modes), figsize=(5 * len(modes), 3.6), sharey=True)
    middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    for axis, mode in zip(axes, modes, strict=True):
        for variant in (v for v in variants if v.mode == mode):
            values = [acceptance_length(variant.steps, a, b) for a, b in itertools.pairwise(edges)]
            received = variant.draft == "received"
            axis.plot(
                middles,
                values,
                marker="o",
                color="#1b7f5c" if received else "#c2452d",
                label=f"draft window {variant.draft}",
            )
        axis.axvline(window, color="#888888", linestyle=":", linewidth=1)
        axis.text(
            window, axis.get_ylim()[0], " window refilled", color="#666666", fontsize=8, va="bottom"
        )
        axis.set_title(f"{mode} pools")
        axis.set_xlabel("tokens already generated")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("acceptance length (tokens a verify step)")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


async def run(arguments: argparse.Namespace) -> list[Variant]:
    prompts = held_out_prompts(arguments.model, arguments.prompts, arguments.prompt_tokens)
    sampling = Sampling(max_tokens=arguments.max_tokens, temperature=arguments.temperature)
    folder = Path(tempfile.mkdtemp(prefix="sluice-acceptance-"))
    variants = []
    try:
        for mode in PoolMode:
            for withheld in (False, True):
                place = folder / f"{mode.value}-{withheld}"
                variants.append(
                    await measure(arguments.model, mode, withheld, prompts, sampling, place)
                )
    finally:
        shutil.rmtree(folder)
    return variants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-dsv4")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=160)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    arguments = parser.parse_args()
    window = json.loads((arguments.model / "config.json").read_text())["sliding_window"]
    variants = asyncio.run(run(arguments))
    edges = list(range(0, arguments.max_tokens + 1, 8))
    text = table(variants, edges, window)
    same = {v.outputs for v in variants}
    text += f"\n\nOutputs of all {len(variants)} variants are {'equal' if len(same) == 1 else 'NOT equal'}."
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "acceptance.md").write_text(text + "\n")
    summary = [
        {"mode": v.mode, "draft": v.draft, "steps": [asdict(step) for step in v.steps]}
        for v in variants
    ]
    (arguments.out / "acceptance.json").write_text(json.dumps(summary) + "\n")
    plot(variants, edges, window, arguments.out / "acceptance.png")
    print(text)


if __name__ == "__main__":
    main()
