"""Train the small DeepSeek-V4-structure model, then its NextN layer, and export the checkpoint folder.

python -m tools.train_tiny_dsv4 --out models/tiny-dsv4
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
from tools.leaky_index import with_mirrored_index_heads
from tools.tiny_dsv4_config import TinyConfig
from tools.tiny_dsv4_export import export_checkpoint, load_checkpoint
from tools.tiny_dsv4_model import TinyDeepseekV4
from tools.tiny_tokenizer import save_tokenizer, train_tokenizer
from tools.training_data import Batch, RowSource
from tools.training_loop import Clock, Optimiser, Rates, balance, rate_at, weighted_loss

MTP_WEIGHT = 0.3
INDEX_WEIGHT = 0.3
DRAFT_STEPS = 3
LONG_PHASE_START = 0.62


@dataclass(frozen=True)
class Plan:
    """How long and how hard to train; whichever of steps and minutes runs out first ends a phase."""

    steps: int = 2400
    minutes: float = 56.0
    nextn_steps: int = 500
    nextn_minutes: float = 12.0
    rows: int = 4
    tokens: int = 256
    adam_lr: float = 5e-3
    muon_lr: float = 1e-2
    seed: int = 20261129
    lr_scale: float = 1.0
    synthetic_share: float = 0.25
    copy_share: float = 0.3


_PLAN_OPTIONS = tuple(field.name for field in fields(Plan))


def optimiser_of(model: TinyDeepseekV4, plan: Plan, prefix: str = "") -> Optimiser:
    """Of the parameters whose names start with `prefix`."""
    chosen = {n: p for n, p in model.named_parameters() if n.startswith(prefix)}
    rates = Rates(plan.adam_lr * plan.lr_scale, plan.muon_lr * plan.lr_scale)
    return Optimiser(chosen, rates, _is_matrix)


def _is_matrix(name: str, parameter: Tensor) -> bool:
    outside = ("embed", "head", "hc_", "gate.weight", "ape", "indexer", "wgate")
    return parameter.dim() == 2 and not any(mark in name for mark in outside)


def joint_losses(model: TinyDeepseekV4, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Main, NextN and indexer losses of one batch."""
    ids, weight = batch.ids, batch.weight
    x = model.streams(ids)
    main = weighted_loss(model.logits(x)[:, :-1], ids[:, 1:], weight[:, 1:])
    y = model.draft(x, ids.roll(-1, dims=1))
    drafted = weighted_loss(model.draft_logits(y)[:, :-2], ids[:, 2:], weight[:, 2:])
    index = [a.index_loss for a in model.attentions() if a.index_loss is not None]
    return main, drafted, torch.stack(index).sum() if index else torch.zeros(())


def balance_routers(model: TinyDeepseekV4) -> None:
    """Move each router's selection bias towards equal load (auxiliary-loss-free balancing)."""
    for moe in model.routers():
        balance(moe.gate.bias, moe.load)


def train_joint(
    model: TinyDeepseekV4, data: RowSource, plan: Plan, out: Path | None
) -> list[float]:
    """Phase 1: the target with its NextN layer; returns the main losses."""
    optimiser = optimiser_of(model, plan)
    losses: list[float] = []
    clock, saved = Clock(plan.steps, plan.minutes), time.monotonic()
    model.train()
    for step in range(plan.steps):
        progress = clock.progress(step)
        if progress >= 1:
            break
        long = progress >= LONG_PHASE_START
        tokens, rows = (plan.tokens * 2, plan.rows // 2) if long else (plan.tokens, plan.rows)
        for attention in model.attentions():
            attention.select, attention.index_rows = long, max(1, rows // 4)
        batch = data.batch(step, rows, tokens, reach=min(1.0, 0.3 + 1.5 * progress))
        main, drafted, index = joint_losses(model, batch)
        (main + MTP_WEIGHT * drafted + INDEX_WEIGHT * index).backward()
        optimiser.step(rate_at(step, progress))
        balance_routers(model)
        losses.append(main.item())
        if step % 20 == 0:
            mean = sum(losses[-20:]) / len(losses[-20:])
            figures = f"main {mean:.3f} nextn {drafted.item():.3f} index {index.item():.3f}"
            clock.log(f"step {step} {progress:.3f} {figures}")
        if step % 100 == 99:
            clock.log(f"step {step} {evaluate(model, data, plan)}")
        if out is not None and time.monotonic() - saved > 180:
            saved = time.monotonic()
            export_checkpoint(model, out)
    return losses


def chain_losses(model: TinyDeepseekV4, batch: Batch) -> list[Tensor]:
    """Distil the frozen target's distribution into each of the chained draft steps."""
    ids = batch.ids
    with torch.no_grad():
        x = model.streams(ids)
        target_p = torch.softmax(model.logits(x), dim=-1)
    losses: list[Tensor] = []
    chain: list[Tensor] = []
    streams = x
    following = ids.roll(-1, dims=1)
    for depth in range(DRAFT_STEPS):
        streams = model.draft(streams, following, chain)
        # Row t (of any depth) predicts token t + 2, which the target predicts at row t + 1.
        log_q = torch.log_softmax(model.draft_logits(streams)[:, depth:-2], dim=-1)
        per_token = -(target_p[:, depth + 1 : -1] * log_q).sum(-1)
        weight = batch.weight[:, depth + 2 :].clamp_min(0.3)
        losses.append((per_token * weight).sum() / weight.sum())
        streams = streams.roll(1, dims=1)
    return losses


def train_nextn(model: TinyDeepseekV4, data: RowSource, plan: Plan, out: Path | None) -> None:
    """Phase 2: only the NextN layer, on chained drafts."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("mtp."))
    optimiser = optimiser_of(model, plan, prefix="mtp.")
    for attention in model.attentions():
        attention.select, attention.index_rows = True, 0
    clock = Clock(plan.nextn_steps, plan.nextn_minutes)
    for step in range(plan.nextn_steps):
        progress = clock.progress(step)
        if progress >= 1:
            break
        long = step % 3 == 0
        rows, tokens = (plan.rows // 2, plan.tokens * 2) if long else (plan.rows, plan.tokens)
        losses = chain_losses(model, data.batch(10**6 + step, rows, tokens, reach=1.0))
        torch.stack(losses).sum().backward()
        optimiser.step(0.5 * min(1.0, (step + 1) / 20) * max(0.02, 1 - progress))
        if step % 20 == 0:
            clock.log(f"nextn {step} {progress:.3f} " + " ".join(f"{v.item():.3f}" for v in losses))
    if out is not None:
        export_checkpoint(model, out)


@torch.no_grad()
def evaluate(model: TinyDeepseekV4, data: RowSource, plan: Plan) -> str:
    """Teacher-forced figures on a fixed batch the training never draws: answers right, NextN agreement."""
    model.eval()
    for attention in model.attentions():
        attention.select, attention.index_rows = True, 0
    batch = data.batch(-1, 16, plan.tokens, reach=1.0)
    x = model.streams(batch.ids)
    best = model.logits(x).argmax(-1)
    right = (best[:, :-1] == batch.ids[:, 1:])[batch.answers[:, 1:]].float().mean().item()
    drafted = model.draft_logits(model.draft(x, batch.ids.roll(-1, dims=1))).argmax(-1)
    prose = ~batch.answers.any(-1)
    agreement = (drafted[:, :-2] == best[:, 1:-1])[prose].float().mean().item()
    model.train()
    return f"answers {right:.3f} nextn agreement on prose {agreement:.3f}"


def main() -> None:
    """Train from scratch (or only the NextN layer of an export) and write the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="start from the model in --out; with --steps 0 only NextN",
    )
    for name in _PLAN_OPTIONS:
        default = getattr(Plan, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(**{name: getattr(args, name) for name in _PLAN_OPTIONS})
    corpus = load_corpus(args.cache)
    if args.resume:
        tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
        model = load_checkpoint(args.out)
    else:
        tokenizer = train_tokenizer(corpus.train, plan.seed)
        save_tokenizer(tokenizer, args.out)
        model = TinyDeepseekV4(TinyConfig(), seed=plan.seed)
    data = RowSource(tokenizer, corpus.train, plan.seed, plan.synthetic_share, plan.copy_share)
    print(
        f"{sum(p.numel() for p in model.parameters())} parameters, {len(data.flat)} prose tokens",
        flush=True,
    )
    if args.compile:
        model.compile()
    train_joint(model, data, plan, args.out)
    if model.config.index_n_heads == TinyConfig().index_n_heads:
        model = with_mirrored_index_heads(model)
    export_checkpoint(model, args.out)
    train_nextn(model, data, plan, args.out)


if __name__ == "__main__":
    main()
