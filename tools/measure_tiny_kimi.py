"""Measure the exported small Kimi model and its DSPARK draft; prints the model card's rows.

python -m tools.measure_tiny_kimi --folder models/tiny-kimi
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
from torch import Tensor

from tools.corpus import DEFAULT_CACHE, load_corpus
from tools.measurement import (
    FILLER_CHARS,
    SEED,
    exact_rate,
    mean_distance_tokens,
    prose_prompts,
)
from tools.synthetic import copy_question, recall_question
from tools.tiny_dspark_export import load_draft
from tools.tiny_dspark_model import TinyDSpark
from tools.tiny_kimi_export import load_checkpoint
from tools.tiny_kimi_generate import continue_rows
from tools.tiny_kimi_model import TinyKimi
from tools.tiny_tokenizer import BOS_ID
from tools.training_data import encode_paragraphs

ROW_TOKENS = 512
PROMPT_TOKENS = 48


@torch.no_grad()
def batched_logits(model: TinyKimi, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits [T, V] of each sequence; what pads the shorter ones comes after them."""
    longest = max(map(len, sequences))
    ids = torch.tensor([[*one, *([0] * (longest - len(one)))] for one in sequences])
    return [rows[: len(one)] for rows, one in zip(model(ids), sequences, strict=True)]


def held_out_rows(tokenizer: Tokenizer, paragraphs: Sequence[str], rows: int) -> Tensor:
    """[rows, ROW_TOKENS] windows spread over the held-out text."""
    flat = encode_paragraphs(tokenizer, paragraphs).long()
    spacing = (len(flat) - ROW_TOKENS) // rows
    ids = torch.stack([flat[i * spacing : i * spacing + ROW_TOKENS] for i in range(rows)])
    ids[:, 0] = BOS_ID
    return ids


@torch.no_grad()
def loss_figures(model: TinyKimi, tokenizer: Tokenizer, ids_BT: Tensor) -> tuple[float, float]:
    """Bits a character and nats a token."""
    logits = model(ids_BT)[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="sum").item()
    chars = sum(len(tokenizer.decode(row[1:])) for row in ids_BT.tolist())
    return loss / math.log(2) / chars, loss / ids_BT[:, 1:].numel()


@torch.no_grad()
def drafts_at(model: TinyKimi, draft: TinyDSpark, ids_BT: Tensor, first: int) -> Tensor:
    """Greedy drafts [B, A, S] of every anchor from `first` to the last token, each knowing only what
    precedes it."""
    rows, tokens = ids_BT.shape
    anchors = torch.arange(first, tokens).expand(rows, -1)
    return draft.greedy(draft.context(model.streams(ids_BT)), ids_BT, anchors)


def emitted_per_step(drafts_AS: Tensor, written_A: Tensor) -> list[int]:
    """Tokens each verify step emits when the target writes `written` (its first token is an anchor).

    A draft stands when it is the target's own token, greedy or sampled, so what the target writes alone
    says how its speculative run goes. The last block, which lacks tokens to compare with, is left out.
    """
    size, at, emitted = drafts_AS.shape[1], 0, []
    while at + size + 1 <= len(written_A):
        same = drafts_AS[at] == written_A[at + 1 : at + 1 + size]
        emitted.append(1 + int(same.long().cumprod(0).sum()))
        at += emitted[-1]
    return emitted


def acceptance(
    model: TinyKimi, draft: TinyDSpark, prompt_BT: Tensor, new_tokens: int, temperature: float
) -> tuple[float, Tensor]:
    """Mean tokens a verify step over all steps of all rows, and the rows."""
    generator = torch.Generator().manual_seed(SEED)
    length = prompt_BT.shape[1]
    ids = continue_rows(model, prompt_BT, length + new_tokens, temperature, generator)
    drafts = drafts_at(model, draft, ids, length)
    steps = [
        n for row, d in zip(ids, drafts, strict=True) for n in emitted_per_step(d, row[length:])
    ]
    return sum(steps) / len(steps), ids


@torch.no_grad()
def agreement(model: TinyKimi, draft: TinyDSpark, ids_BT: Tensor) -> float:
    """Share of held-out positions where the first draft is the target's choice."""
    first = drafts_at(model, draft, ids_BT[:, :256], 1)[..., 0]
    return float((first == model(ids_BT[:, :256]).argmax(-1)[:, 1:]).float().mean())


def report(
    model: TinyKimi, draft: TinyDSpark, tokenizer: Tokenizer, held_out: Sequence[str], quick: bool
) -> None:
    """Print every figure."""
    ids = held_out_rows(tokenizer, held_out, 8 if quick else 40)
    bits, nats = loss_figures(model, tokenizer, ids)
    print(
        f"held out: {bits:.3f} bits/char, {nats:.3f} nats/token; "
        f"first draft = target argmax: {agreement(model, draft, ids[:16]):.3f}",
        flush=True,
    )
    for filler in FILLER_CHARS:
        rng = random.Random(f"{SEED}:{filler}")
        questions = [recall_question(rng, 6, filler, held_out) for _ in range(20 if quick else 60)]
        copies = [copy_question(rng, 8, filler, held_out) for _ in range(10 if quick else 30)]
        recall, copy = (
            exact_rate(lambda rows: batched_logits(model, rows), tokenizer, some)
            for some in (questions, copies)
        )
        distance = mean_distance_tokens(tokenizer, questions)
        print(
            f"filler {filler:4d} chars (answer {distance:.0f} tokens back): recall {recall:.2f}, "
            f"8-word copy {copy:.2f}",
            flush=True,
        )
    prompts = prose_prompts(tokenizer, held_out, 8 if quick else 32)
    prompt = torch.tensor([one[:PROMPT_TOKENS] for one in prompts if len(one) >= PROMPT_TOKENS])
    for temperature in (0.0, 0.7):
        length, rows = acceptance(model, draft, prompt, 128, temperature)
        most = draft.config.block_size + 1
        print(f"acceptance length at T={temperature}: {length:.2f} of {most}", flush=True)
        for row in rows[:3].tolist():
            opening, written = row[PROMPT_TOKENS - 12 : PROMPT_TOKENS], row[PROMPT_TOKENS:]
            print(f"  {tokenizer.decode(opening)!r} -> {tokenizer.decode(written)!r}")


def main() -> None:
    """Load the folder and the corpus, then report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    model = load_checkpoint(args.folder)
    draft = load_draft(args.folder, model)
    report(model, draft, tokenizer, load_corpus(args.cache).held_out, args.quick)


if __name__ == "__main__":
    main()
