"""Dense, differentiable building blocks of the small DeepSeek-V4 model (training side only).

Formulas: DeepSeek-V4 as published (inference reference and transformers' `deepseek_v4`); serving has its own code.

Shape suffixes: B batch, T tokens, D hidden, H heads, d head_dim, N streams, E compressed entries, R ratio,
K window keys, I index heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.rms_norm import RMSNorm
from tools.tiny_dsv4_config import TinyConfig

NEG_INF = -1e30


def rms(x: Tensor, eps: float) -> Tensor:
    """Unweighted root-mean-square normalisation of the last axis."""
    return F.rms_norm(x, (x.shape[-1],), None, eps)


def rope_frequencies(config: TinyConfig, compressed: bool) -> Tensor:
    """[rope_dim / 2] angular frequencies; layers that compress use the long table with YaRN."""
    dim = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    freq = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if not compressed:
        return freq.float()

    def corrected(rotations: float) -> float:
        ratio = config.yarn_original_tokens / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(base))

    low = max(math.floor(corrected(config.yarn_beta_fast)), 0)
    high = min(math.ceil(corrected(config.yarn_beta_slow)), dim - 1)
    steps = torch.arange(dim // 2, dtype=torch.float64)
    ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return (freq / config.yarn_factor * ramp + freq * (1 - ramp)).float()


class Rope(nn.Module):
    """Rotates interleaved pairs of the trailing `rope_dim` values."""

    freq: Tensor

    def __init__(self, config: TinyConfig, compressed: bool) -> None:
        super().__init__()
        self.dim = config.qk_rope_head_dim
        self.register_buffer("freq", rope_frequencies(config, compressed), persistent=False)

    def forward(self, x: Tensor, positions_T: Tensor, inverse: bool = False) -> Tensor:
        """Rotate x [B, T, d] or [B, T, H, d] by the positions of its T axis."""
        angle = positions_T.float()[:, None] * (-self.freq if inverse else self.freq)
        cos, sin = angle.cos(), angle.sin()
        if x.dim() == 4:
            cos, sin = cos[:, None], sin[:, None]
        plain, rotary = x[..., : -self.dim], x[..., -self.dim :]
        even, odd = rotary[..., 0::2], rotary[..., 1::2]
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return torch.cat((plain, turned.flatten(-2)), dim=-1)


def hyper_mix(
    x_BTND: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, hc_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Sublayer input [B,T,D], write weights [B,T,N] and stream mixing [B,T,N,N] (Sinkhorn-normalised)."""
    n = x_BTND.shape[-2]
    flat = x_BTND.flatten(-2)
    z = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    pre = torch.sigmoid(z[..., :n] * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(z[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (z[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    comb = torch.softmax(comb, dim=-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return (pre.unsqueeze(-2) @ x_BTND).squeeze(-2), post, comb


def hyper_write(x_BTND: Tensor, f_BTD: Tensor, post_BTN: Tensor, comb_BTNN: Tensor) -> Tensor:
    """X'_k = post_k f + sum_j C[j, k] X_j."""
    return comb_BTNN.transpose(-1, -2) @ x_BTND + post_BTN.unsqueeze(-1) * f_BTD.unsqueeze(-2)


def hyper_collapse(
    x_BTND: Tensor, fn: Tensor, base: Tensor, scale: Tensor, hc_eps: float, eps: float
) -> Tensor:
    """The head's weighted sum of streams, [B,T,D]."""
    flat = x_BTND.flatten(-2)
    z = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    return ((torch.sigmoid(z * scale + base) + hc_eps).unsqueeze(-1) * x_BTND).sum(-2)


class Compressor(nn.Module):
    """Gated pooling of R tokens into one entry; with R = 4 neighbouring windows overlap."""

    def __init__(self, config: TinyConfig, ratio: int, dim: int) -> None:
        super().__init__()
        self.ratio, self.dim, self.overlap = ratio, dim, ratio == 4
        width = dim * (2 if self.overlap else 1)
        self.wkv = nn.Linear(config.hidden_size, width, bias=False)
        self.wgate = nn.Linear(config.hidden_size, width, bias=False)
        self.ape = nn.Parameter(torch.zeros(ratio, width))
        self.norm = RMSNorm(dim, config.rms_norm_eps)

    def forward(self, x_BTD: Tensor, rope: Rope) -> Tensor:
        """Entries [B, T // R, dim], rotated to the position of their first token."""
        count = x_BTD.shape[1] // self.ratio
        x = x_BTD[:, : count * self.ratio]
        kv = self.wkv(x).unflatten(1, (count, self.ratio))
        gate = self.wgate(x).unflatten(1, (count, self.ratio)) + self.ape
        if self.overlap:
            kv = torch.cat((_shift(kv[..., : self.dim], 0.0), kv[..., self.dim :]), dim=2)
            gate = torch.cat((_shift(gate[..., : self.dim], NEG_INF), gate[..., self.dim :]), dim=2)
        entries = self.norm((torch.softmax(gate, dim=2) * kv).sum(2))
        starts = torch.arange(count, device=x.device) * self.ratio
        rotated: Tensor = rope(entries, starts)
        return rotated


def _shift(x: Tensor, fill: float) -> Tensor:
    """The previous window's rows along axis 1; `fill` before the first."""
    return F.pad(x[:, :-1], (0, 0, 0, 0, 1, 0), value=fill)


class Indexer(nn.Module):
    """Scores ratio-4 entries for every query; only the order of the scores matters."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.dim, bias=False)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.compressor = Compressor(config, 4, self.dim)

    def forward(self, x_BTD: Tensor, qr_BTr: Tensor, rope: Rope) -> Tensor:
        """Scores [B, T, E], not masked."""
        positions = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        q_BTIc = rope(self.wq_b(qr_BTr).unflatten(-1, (self.heads, self.dim)), positions)
        keys_BEc = self.compressor(x_BTD, rope)
        weight_BTI = self.weights_proj(x_BTD) * (self.dim**-0.5 * self.heads**-0.5)
        dots = torch.relu(q_BTIc.flatten(1, 2) @ keys_BEc.transpose(1, 2))
        dots_BTIE = dots.unflatten(1, (x_BTD.shape[1], self.heads))
        scores_BTE: Tensor = (weight_BTI.unsqueeze(2) @ dots_BTIE).squeeze(2)
        return scores_BTE


class Gate(nn.Module):
    """Router weights; `tid2eid` [V, K] exists in hash layers only, `bias` [experts] in all others."""

    tid2eid: Tensor
    bias: Tensor

    def __init__(self, config: TinyConfig, hashed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        if hashed:
            table = torch.zeros(config.vocab_size, config.num_experts_per_tok, dtype=torch.int64)
            self.register_buffer("tid2eid", table)
        else:
            self.register_buffer("bias", torch.zeros(config.n_routed_experts))


class MoE(nn.Module):
    """Top-k of sqrt(softplus) affinities (or a token-id table) over routed experts, plus one shared expert."""

    load: Tensor

    def __init__(self, config: TinyConfig, hashed: bool) -> None:
        super().__init__()
        self.config, self.hashed = config, hashed
        self.gate = Gate(config, hashed)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.n_routed_experts))
        self.shared_experts = Expert(config)
        self.register_buffer("load", torch.zeros(config.n_routed_experts), persistent=False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Rows x [B * T, D] with their token ids [B * T]."""
        scores = torch.sqrt(F.softplus(F.linear(x, self.gate.weight)))
        if self.hashed:
            chosen = self.gate.tid2eid[ids]
        else:
            chosen = (scores + self.gate.bias).topk(self.config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self.config.routed_scaling_factor
        out = self.shared_experts(x)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.config.n_routed_experts)
        if self.training:
            self.load = counts.float()
        token = order // self.config.num_experts_per_tok
        rows = x.index_select(0, token).split(counts.tolist())
        routed = torch.cat([e(r) for e, r in zip(self.experts, rows, strict=True)])
        routed = routed * weights.flatten().index_select(0, order).unsqueeze(-1)
        total: Tensor = out.index_add(0, token, routed)
        return total


class Expert(nn.Module):
    """w2(silu(min(w1 x, L)) * clamp(w3 x, -L, L))."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.limit = config.swiglu_limit

    def forward(self, x: Tensor) -> Tensor:
        gate = self.w1(x).clamp(max=self.limit)
        out: Tensor = self.w2(F.silu(gate) * self.w3(x).clamp(-self.limit, self.limit))
        return out
