"""What every trainer of a small model shares: the optimiser pair, the rate, the loss, router balance, a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.muon import Muon

BIAS_STEP = 1e-3
DECAY_START = 0.55
WARM_UP_STEPS = 30


@dataclass(frozen=True)
class Rates:
    """Learning rates at full rate."""

    adam: float = 5e-3
    muon: float = 1e-2


class Optimiser:
    """Muon for matrices, AdamW for the rest; one `rate` in (0, 1] scales both."""

    def __init__(
        self,
        chosen: Mapping[str, nn.Parameter],
        rates: Rates,
        is_matrix: Callable[[str, Tensor], bool],
    ) -> None:
        self.rates = rates
        muon = [name for name in chosen if is_matrix(name, chosen[name])]
        self.parameters = list(chosen.values())
        self.muon = Muon([chosen[n] for n in muon])
        self.adam = torch.optim.AdamW(
            [p for n, p in chosen.items() if n not in muon],
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=True,
        )

    def step(self, rate: float) -> None:
        """Clip, update and drop gradients."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.rates.adam * rate
        self.muon.lr = self.rates.muon * rate
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.muon.step()


class Clock:
    """Progress of a phase that ends when its steps or its minutes run out, and its log."""

    def __init__(self, steps: int, minutes: float) -> None:
        self.steps, self.minutes = steps, minutes
        self.start = time.monotonic()

    def progress(self, step: int) -> float:
        """In [0, 1); 1 or more when the phase is over."""
        if step >= self.steps:
            return 1.0
        return max(step / self.steps, (time.monotonic() - self.start) / 60 / self.minutes)

    def log(self, message: str) -> None:
        """Print with the seconds since the start."""
        print(f"[{time.monotonic() - self.start:7.1f} s] {message}", flush=True)


def rate_at(step: int, progress: float) -> float:
    """Warm-up, constant, then linear decay to 2 %."""
    decay = 1.0 if progress < DECAY_START else max(0.02, (1 - progress) / (1 - DECAY_START))
    return min(1.0, (step + 1) / WARM_UP_STEPS) * decay


def weighted_loss(logits: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """Mean cross entropy under token weights; logits [B, t, V]."""
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (loss * weight.flatten()).sum() / weight.sum().clamp_min(1e-6)


def balance(bias: Tensor, load: Tensor) -> None:
    """Move a router's selection bias towards equal load (auxiliary-loss-free balancing)."""
    bias += BIAS_STEP * torch.sign(load.mean() - load)
