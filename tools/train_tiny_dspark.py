"""Train the DSPARK draft of an exported small Kimi model, on text the target wrote and on the corpus.

python -m tools.train_tiny_dspark --out models/tiny-kimi
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.corpus import DEFAULT_CACHE, load_corpus
from tools.tiny_dspark_config import TinyDSparkConfig
from tools.tiny_dspark_export import export_draft, load_draft
from tools.tiny_dspark_model import TinyDSpark
from tools.tiny_kimi_export import load_checkpoint
from tools.tiny_kimi_generate import continue_rows
from tools.tiny_kimi_model import TinyKimi
from tools.tiny_tokenizer import BOS_ID
from tools.training_data import RowSource
from tools.training_loop import Clock, Optimiser, Rates, rate_at

_OUTSIDE_MUON = ("markov_w1", "markov_w2")
_PROMPT_TOKENS = (24, 96)
# Later drafts only count when all before them stand (weights as in DFlash, arXiv 2602.06036).
_LATER_DRAFTS_FADE = 0.85
_TEMPERATURES = (0.0, 0.7)


@dataclass(frozen=True)
class Plan:
    """`pool_rows` of `tokens` are written by the target before training; batches mix them with `corpus_rows`."""

    steps: int = 700
    minutes: float = 9.0
    pool_rows: int = 512
    written_rows: int = 3
    corpus_rows: int = 1
    tokens: int = 256
    anchors: int = 64
    adam_lr: float = 5e-3
    muon_lr: float = 1e-2
    seed: int = 20261130


_PLAN_OPTIONS = tuple(field.name for field in fields(Plan))


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon trains it."""
    return parameter.dim() == 2 and not any(mark in name for mark in _OUTSIDE_MUON)


def write_rows(target: TinyKimi, flat: Tensor, plan: Plan) -> Tensor:
    """[pool_rows, tokens]: prose openings continued by the target, half of them greedily."""
    rng, generator = random.Random(plan.seed), torch.Generator().manual_seed(plan.seed)
    group, rows = 128, []
    for number in range(-(-plan.pool_rows // group)):
        length = rng.randrange(*_PROMPT_TOKENS)
        starts = [rng.randrange(len(flat) - length) for _ in range(group)]
        prompt = torch.stack([flat[start : start + length] for start in starts]).long()
        prompt[:, 0] = BOS_ID
        temperature = _TEMPERATURES[number % len(_TEMPERATURES)]
        rows.append(continue_rows(target, prompt, plan.tokens, temperature, generator))
    return torch.cat(rows)[: plan.pool_rows]


def block_losses(draft: TinyDSpark, target: TinyKimi, ids_RT: Tensor, anchor_RA: Tensor) -> Tensor:
    """Cross entropy with the frozen target's distributions, a mean for each draft of the block, [S]."""
    with torch.no_grad():
        streams = target.streams(ids_RT)
        p_RTV = torch.softmax(target.logits(streams[-1]), dim=-1)
    size = draft.config.block_size
    position_RAS = anchor_RA.unsqueeze(-1) + torch.arange(size)
    row = torch.arange(len(ids_RT))[:, None, None]
    hidden = draft.hidden(draft.context(streams), ids_RT, anchor_RA)
    log_q = torch.log_softmax(draft.logits(hidden, ids_RT[row, position_RAS]), dim=-1)
    return -(p_RTV[row, position_RAS] * log_q).sum(-1).mean((0, 1))


def random_anchors(
    ids_RT: Tensor, count: int, block_size: int, generator: torch.Generator
) -> Tensor:
    """[R, count] positions that leave room for a block and the token after it."""
    return torch.randint(1, ids_RT.shape[1] - block_size, (len(ids_RT), count), generator=generator)


def train(
    draft: TinyDSpark,
    target: TinyKimi,
    written: Tensor,
    data: RowSource,
    plan: Plan,
    out: Path | None,
) -> list[float]:
    """Train in place; returns the summed losses."""
    optimiser = Optimiser(
        dict(draft.named_parameters()), Rates(plan.adam_lr, plan.muon_lr), is_matrix
    )
    generator = torch.Generator().manual_seed(plan.seed)
    fade = _LATER_DRAFTS_FADE ** torch.arange(draft.config.block_size)
    clock, losses, step = Clock(plan.steps, plan.minutes), [], 0
    draft.train()
    while (progress := clock.progress(step)) < 1:
        chosen = torch.randint(len(written), (plan.written_rows,), generator=generator)
        corpus = data.batch(10**6 + step, plan.corpus_rows, plan.tokens, reach=1.0).ids
        ids = torch.cat((written[chosen], corpus))
        anchors = random_anchors(ids, plan.anchors, draft.config.block_size, generator)
        each = block_losses(draft, target, ids, anchors)
        loss = (each * fade).sum() / fade.sum()
        loss.backward()
        optimiser.step(rate_at(step, progress))
        losses.append(loss.item())
        if step % 20 == 0:
            clock.log(f"step {step} {progress:.3f} " + " ".join(f"{v:.3f}" for v in each.tolist()))
        if out is not None and step % 200 == 199:
            export_draft(draft, out)
        step += 1
    return losses


def main() -> None:
    """Train a new draft, or go on with `--resume`, and write it below the target's folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    parser.add_argument("--resume", action="store_true", help="start from the draft in --out")
    for name in _PLAN_OPTIONS:
        default = getattr(Plan, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(**{name: getattr(args, name) for name in _PLAN_OPTIONS})
    target = load_checkpoint(args.out).requires_grad_(False)
    target.train()  # chunks; nothing else differs
    draft = (
        load_draft(args.out, target)
        if args.resume
        else TinyDSpark(TinyDSparkConfig(), target, plan.seed)
    )
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    data = RowSource(tokenizer, load_corpus(args.cache).train, plan.seed)
    print(f"{sum(p.numel() for p in draft.parameters())} parameters", flush=True)
    written = write_rows(target, data.flat, plan)
    print(f"{written.numel()} tokens written by the target", flush=True)
    train(draft, target, written, data, plan, args.out)
    export_draft(draft, args.out)


if __name__ == "__main__":
    main()
