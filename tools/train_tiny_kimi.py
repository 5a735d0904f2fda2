"""Train the small Kimi Linear model and export its folder; its DSPARK draft comes after (`train_tiny_dspark`).

python -m tools.train_tiny_kimi --out models/tiny-kimi
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.corpus import DEFAULT_CACHE, load_corpus
from tools.tiny_kimi_config import TinyKimiConfig
from tools.tiny_kimi_export import export_checkpoint, load_checkpoint
from tools.tiny_kimi_model import TinyKimi
from tools.training_data import Batch, RowSource
from tools.training_loop import Clock, Optimiser, Rates, balance, rate_at, weighted_loss

LONG_PHASE_START = 0.7
SECONDS_BETWEEN_EXPORTS = 150
_OUTSIDE_MUON = ("embed_tokens", "lm_head", "gate.weight")


@dataclass(frozen=True)
class Plan:
    """How long and how hard to train; whichever of steps and minutes runs out first ends it."""

    steps: int = 1500
    minutes: float = 18.0
    rows: int = 4
    tokens: int = 256
    adam_lr: float = 5e-3
    muon_lr: float = 1e-2
    seed: int = 20261129
    synthetic_share: float = 0.25
    copy_share: float = 0.3


_PLAN_OPTIONS = tuple(field.name for field in fields(Plan))


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon trains it."""
    return parameter.dim() == 2 and not any(mark in name for mark in _OUTSIDE_MUON)


def batch_loss(model: TinyKimi, batch: Batch) -> Tensor:
    """Weighted next-token loss of one batch."""
    return weighted_loss(model(batch.ids)[:, :-1], batch.ids[:, 1:], batch.weight[:, 1:])


def train(model: TinyKimi, data: RowSource, plan: Plan, out: Path | None) -> list[float]:
    """Train in place; returns the losses."""
    optimiser = Optimiser(
        dict(model.named_parameters()), Rates(plan.adam_lr, plan.muon_lr), is_matrix
    )
    losses: list[float] = []
    clock, saved = Clock(plan.steps, plan.minutes), time.monotonic()
    model.train()
    step = 0
    while (progress := clock.progress(step)) < 1:
        long = progress >= LONG_PHASE_START
        tokens, rows = (plan.tokens * 2, plan.rows // 2) if long else (plan.tokens, plan.rows)
        batch = data.batch(step, rows, tokens, reach=min(1.0, 0.3 + 1.5 * progress))
        loss = batch_loss(model, batch)
        loss.backward()
        optimiser.step(rate_at(step, progress))
        for moe in model.routers():
            balance(moe.gate.e_score_correction_bias, moe.load)
        losses.append(loss.item())
        if step % 20 == 0:
            clock.log(
                f"step {step} {progress:.3f} loss {sum(losses[-20:]) / len(losses[-20:]):.3f}"
            )
        if step % 100 == 99:
            clock.log(f"step {step} answers {answers_right(model, data, plan):.3f}")
        if out is not None and time.monotonic() - saved > SECONDS_BETWEEN_EXPORTS:
            saved = time.monotonic()
            export_checkpoint(model, out)
        step += 1
    return losses


@torch.no_grad()
def answers_right(model: TinyKimi, data: RowSource, plan: Plan) -> float:
    """Teacher-forced share of synthetic answer tokens right, on a batch the training never draws."""
    model.eval()
    batch = data.batch(-1, 16, plan.tokens, reach=1.0)
    best = model(batch.ids).argmax(-1)
    model.train()
    return float((best[:, :-1] == batch.ids[:, 1:])[batch.answers[:, 1:]].float().mean())


def main() -> None:
    """Train from scratch, or go on with `--resume`, and write the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("models/tiny-dsv4/tokenizer.json"))
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    parser.add_argument("--resume", action="store_true", help="start from the model in --out")
    for name in _PLAN_OPTIONS:
        default = getattr(Plan, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(**{name: getattr(args, name) for name in _PLAN_OPTIONS})
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    model = load_checkpoint(args.out) if args.resume else TinyKimi(TinyKimiConfig(), seed=plan.seed)
    data = RowSource(
        tokenizer, load_corpus(args.cache).train, plan.seed, plan.synthetic_share, plan.copy_share
    )
    count = sum(p.numel() for p in model.parameters())
    print(f"{count} parameters, {len(data.flat)} prose tokens", flush=True)
    train(model, data, plan, args.out)
    export_checkpoint(model, args.out)


if __name__ == "__main__":
    main()
