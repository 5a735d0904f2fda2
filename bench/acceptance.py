"""Acceptance length by decode position, with the draft's window received and with it withheld, in one run.

``python -m bench.acceptance`` (``make bench-acceptance``) starts a real pair for each pool mode and variant, sends
the same prompts and writes a table, a JSON file and a plot. The withheld variant is the fault that this project
exists for: the draft component is silently not sent, outputs stay right, and only acceptance shows it.

Three workloads, because the size of the effect is theirs: held-out prose greedily and sampled, and the continuation
of a word list that began within the draft's window, which a draft can't guess without having seen it.

``--model models/tiny-kimi`` (``make bench-acceptance-dspark``) does the same with a DSPARK draft, whose component
holds the whole prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from sluice.config import PoolMode
from sluice.types import Sampling
from tests.e2e.pods import Answer, Pair, generate
from tools.synthetic import WORDS

ROOT = Path(__file__).parents[1]
DRAFT_WINDOW = {PoolMode.PAGED: "draft.swa", PoolMode.UNIFIED: "draft.swa_ring"}
DSPARK_CONTEXT = {PoolMode.PAGED: "draft.kv"}  # pages whatever the mode: one is enough
CONCURRENCY = 4


@dataclass(frozen=True)
class Step:
    """One verify step: how many tokens had been emitted before it, and how many it emitted at most."""

    position: int
    emitted: int  # accepted drafts + 1


@dataclass(frozen=True)
class Workload:
    """Prompts and how they are continued."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling


@dataclass(frozen=True)
class Variant:
    """What one pair did with one workload."""

    mode: str
    workload: str
    draft: str  # "received" or "withheld"
    greedy: bool
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


def copy_prompts(model_dir: Path, count: int, words: int = 10) -> list[tuple[int, ...]]:
    """Prose, then "[ w1 ... wn ]", then "[": what follows is the list again, all of it inside the window."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    paragraphs = (ROOT / "bench" / "held_out.txt").read_text().split("\n\n")
    rng = random.Random(5)
    prompts = []
    for number in range(count):
        span = " ".join(rng.choice(WORDS) for _ in range(words))
        prose = paragraphs[number % len(paragraphs)][:150].rpartition(" ")[0]
        prompts.append((0, *tokenizer.encode(f"{prose}\n[ {span} ]\n[").ids))
    return prompts


async def measure(
    model_dir: Path,
    mode: PoolMode,
    withheld: str,
    workloads: Sequence[Workload],
    folder: Path,
) -> list[Variant]:
    """One pair from which the components in ``withheld`` (a comma list) are silently not sent.

    Stale rows, not zeros: other requests run first, and what is measured finds their rows.
    """
    settings = {"fault_withhold": withheld} if withheld else {}
    pair = Pair.create(folder, model_dir, None, pool_mode=mode.value, **settings)
    pair.start()
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(prompt: tuple[int, ...], sampling: Sampling, seed: int) -> Answer:
        async with places:
            return await generate(pair, prompt, replace(sampling, seed=seed), timeout_s=300.0)

    async def all_of(workload: Workload) -> list[Answer]:
        jobs = [one(p, workload.sampling, seed) for seed, p in enumerate(workload.prompts)]
        return list(await asyncio.gather(*jobs))

    try:
        await pair.ready()
        first = workloads[0]
        await all_of(replace(first, prompts=first.prompts[-1:-9:-1]))
        answers = [await all_of(workload) for workload in workloads]
    finally:
        pair.kill()
    return [
        Variant(
            mode.value,
            workload.name,
            "withheld" if withheld else "received",
            workload.sampling.temperature == 0,
            tuple(tuple(answer.token_ids) for answer in done),
            tuple(step for answer in done for step in steps_of(answer)),
        )
        for workload, done in zip(workloads, answers, strict=True)
    ]


def outputs_differ(variants: Sequence[Variant]) -> bool:
    """Whether any greedy workload's outputs depend on pool mode or draft. They must not."""
    names = {variant.workload for variant in variants if variant.greedy}
    return any(len({v.outputs for v in variants if v.workload == name}) > 1 for name in names)


def draft_components(model_dir: Path) -> dict[PoolMode, str]:
    """What the model's draft has read of a prompt lies in this component, by pool mode."""
    return DSPARK_CONTEXT if (model_dir / "dspark").is_dir() else DRAFT_WINDOW


def table(variants: Sequence[Variant], edges: Sequence[int], window: int) -> str:
    rows = [
        "| workload | pool mode | decode position | received | withheld | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for workload, mode in dict.fromkeys((v.workload, v.mode) for v in variants):
        pair = {v.draft: v.steps for v in variants if (v.workload, v.mode) == (workload, mode)}
        for first, last in [*itertools.pairwise(edges), (0, window), (0, 1 << 30)]:
            if last == 0:  # no window
                continue
            good = acceptance_length(pair["received"], first, last)
            bad = acceptance_length(pair["withheld"], first, last)
            name = f"{first}..{last - 1}" if last < 1 << 30 else "all"
            name = "the first window" if (first, last) == (0, window) else name
            rows.append(
                f"| {workload} | {mode} | {name} | {good:.3f} | {bad:.3f} | {good / bad:.3f} |"
            )
    return "\n".join(rows)


def plot(variants: Sequence[Variant], edges: Sequence[int], window: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads = list(dict.fromkeys(variant.workload for variant in variants))
    figure, axes = pyplot.subplots(
        1, len(workloads), figsize=(4.2 * len(workloads), 3.6), sharey=True
    )
    middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    for axis, workload in zip(axes, workloads, strict=True):
        for variant in (v for v in variants if v.workload == workload):
            received, paged = variant.draft == "received", variant.mode == "paged"
            axis.plot(
                middles,
                [acceptance_length(variant.steps, a, b) for a, b in itertools.pairwise(edges)],
                marker="o" if paged else "x",
                linestyle="-" if paged else "--",
                color="#1b7f5c" if received else "#c2452d",
                label=f"draft state {variant.draft}, {variant.mode}",
            )
        if window:
            axis.axvline(window, color="#888888", linestyle=":", linewidth=1)
            axis.text(window, 1.0, " window refilled", color="#666666", fontsize=8, va="bottom")
        axis.set_title(workload)
        axis.set_xlabel("tokens already generated")
        axis.set_ylim(0.95, max(step.emitted for v in variants for step in v.steps) + 0.05)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("acceptance length (tokens a verify step)")
    axes[0].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(0.0, 0.25))
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def workloads_of(arguments: argparse.Namespace) -> list[Workload]:
    prose = tuple(held_out_prompts(arguments.model, arguments.prompts, arguments.prompt_tokens))
    copies = tuple(copy_prompts(arguments.model, arguments.prompts))
    greedy = Sampling(max_tokens=arguments.max_tokens, ignore_eos=True)
    return [
        Workload("prose, greedy", prose, greedy),
        Workload("prose, T = 0.7", prose, replace(greedy, temperature=0.7)),
        Workload("copying a list, greedy", copies, greedy),
    ]


async def run(arguments: argparse.Namespace) -> list[Variant]:
    workloads = workloads_of(arguments)
    variants: list[Variant] = []
    with tempfile.TemporaryDirectory(prefix="sluice-acceptance-") as folder:
        for mode, component in draft_components(arguments.model).items():
            for withheld in ("", component):
                place = Path(folder) / f"{mode.value}-{withheld or 'received'}"
                variants += await measure(arguments.model, mode, withheld, workloads, place)
    return variants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-dsv4")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=120)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--name", default="acceptance", help="of the files with the results")
    arguments = parser.parse_args()
    config = json.loads((arguments.model / "config.json").read_text())
    window = config.get("sliding_window", 0)
    variants = asyncio.run(run(arguments))
    edges = list(range(0, arguments.max_tokens + 1, 8))
    text = table(variants, edges, window)
    verdict = "DIFFER" if outputs_differ(variants) else "are equal"
    text += f"\n\nGreedy outputs {verdict} in every pool mode, with and without the draft's state."
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{arguments.name}.md").write_text(text + "\n")
    summary = [
        {
            "mode": v.mode,
            "workload": v.workload,
            "draft": v.draft,
            "steps": [[step.position, step.emitted] for step in v.steps],
        }
        for v in variants
    ]
    (arguments.out / f"{arguments.name}.json").write_text(json.dumps(summary) + "\n")
    plot(variants, edges, window, arguments.out / f"{arguments.name}.png")
    print(text)


if __name__ == "__main__":
    main()
