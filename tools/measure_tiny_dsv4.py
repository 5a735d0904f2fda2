"""Measure the exported small model: held-out loss, draft acceptance, far recall; prints the model card's rows.

python -m tools.measure_tiny_dsv4 --folder models/tiny-dsv4
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from tools.corpus import DEFAULT_CACHE, load_corpus
from tools.measurement import (
    FILLER_CHARS,
    SEED,
    LogitsOf,
    exact_rate,
    mean_distance_tokens,
    prose_prompts,
)
from tools.synthetic import copy_question, recall_question
from tools.tiny_dsv4_export import load_checkpoint
from tools.tiny_dsv4_generate import Generation, generate, run_target
from tools.tiny_dsv4_model import TinyDeepseekV4
from tools.tiny_tokenizer import BOS_ID
from tools.training_data import encode_paragraphs

ROW_TOKENS = 512
EARLY_STEPS = 6  # greedy text of so small a model soon loops, and loops are easy to draft


@torch.no_grad()
def held_out_figures(
    model: TinyDeepseekV4, tokenizer: Tokenizer, paragraphs: Sequence[str], rows: int
) -> tuple[float, float, float]:
    """Bits a character, nats a token, and the share of positions where NextN's choice is the target's."""
    flat = encode_paragraphs(tokenizer, paragraphs).long()
    spacing = (len(flat) - ROW_TOKENS) // rows
    loss_nats = agree = positions = chars = tokens = 0.0
    for row in range(rows):
        ids = flat[row * spacing : row * spacing + ROW_TOKENS].clone()
        ids[0] = BOS_ID
        x = model.streams(ids[None])
        logits = model.logits(x)[0]
        loss_nats += F.cross_entropy(logits[:-1], ids[1:], reduction="sum").item()
        tokens += ROW_TOKENS - 1
        chars += len(tokenizer.decode(ids[1:].tolist()))
        drafted = model.draft_logits(model.draft(x, ids.roll(-1)[None]))[0].argmax(-1)
        agree += (drafted[:-2] == logits[1:-1].argmax(-1)).sum().item()
        positions += ROW_TOKENS - 2
    return loss_nats / math.log(2) / chars, loss_nats / tokens, agree / positions


def logits_of(model: TinyDeepseekV4) -> LogitsOf:
    """One sequence at a time."""
    return lambda sequences: [run_target(model, ids)[1] for ids in sequences]


def acceptance(
    model: TinyDeepseekV4, prompts: Sequence[list[int]], new_tokens: int, temperature: float
) -> tuple[float, list[Generation]]:
    """Mean tokens a verify step over all steps of all prompts (3 drafts, so 1 to 4)."""
    made = [
        generate(model, p, new_tokens, temperature=temperature, seed=SEED + i)
        for i, p in enumerate(prompts)
    ]
    steps = [n for g in made for n in g.emitted_per_step]
    return sum(steps) / len(steps), made


def report(
    model: TinyDeepseekV4, tokenizer: Tokenizer, held_out: Sequence[str], quick: bool, recall: bool
) -> None:
    """Print every figure, the recall rates only if asked."""
    bits, nats, agreement = held_out_figures(model, tokenizer, held_out, 8 if quick else 40)
    print(
        f"held out: {bits:.3f} bits/char, {nats:.3f} nats/token; NextN = target argmax: {agreement:.3f}",
        flush=True,
    )
    for filler in FILLER_CHARS if recall else ():
        rng = random.Random(f"{SEED}:{filler}")
        questions = [recall_question(rng, 6, filler, held_out) for _ in range(20 if quick else 60)]
        mean = mean_distance_tokens(tokenizer, questions)
        rate = exact_rate(logits_of(model), tokenizer, questions)
        copies = [copy_question(rng, 8, filler, held_out) for _ in range(10 if quick else 30)]
        print(
            f"filler {filler:4d} chars (answer {mean:.0f} tokens back): recall {rate:.2f}, "
            f"8-word copy {exact_rate(logits_of(model), tokenizer, copies):.2f}",
            flush=True,
        )
    prompts = prose_prompts(tokenizer, held_out, 4 if quick else 12)
    for temperature in (0.0, 0.7):
        length, made = acceptance(model, prompts, 64 if quick else 80, temperature)
        early = [n for g in made for n in g.emitted_per_step[:EARLY_STEPS]]
        print(
            f"acceptance length at T={temperature}: {length:.2f} of 4 "
            f"(first {EARLY_STEPS} steps, before loops: {sum(early) / len(early):.2f})",
            flush=True,
        )
        for prompt, generation in list(zip(prompts, made, strict=True))[:4]:
            print(
                f"  {tokenizer.decode(prompt[-12:])!r} -> {tokenizer.decode(list(generation.tokens))!r}"
            )


def main() -> None:
    """Load the folder and the corpus, then report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-recall", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    held_out = load_corpus(args.cache).held_out
    report(load_checkpoint(args.folder), tokenizer, held_out, args.quick, not args.no_recall)


if __name__ == "__main__":
    main()
