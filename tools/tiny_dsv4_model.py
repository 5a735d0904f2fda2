"""The small DeepSeek-V4 model and its NextN layer for training; `state_dict()` keys are the official names.

Shape suffixes: B batch, T tokens (multiple of the window), D hidden, N streams, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tools.rms_norm import RMSNorm
from tools.tiny_dsv4_attention import Attention
from tools.tiny_dsv4_config import TinyConfig
from tools.tiny_dsv4_layers import MoE, hyper_collapse, hyper_mix, hyper_write

_COMB_DIAGONAL = 3.0
_PRE_LOGIT_OFF, _PRE_LOGIT_ON = -2.0, 0.5


_AVERAGE_LOGIT = -1.1  # sigmoid gives a quarter: four streams start as a plain average


def hyper_parameters(
    config: TinyConfig, favourite: int
) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    """fn, base, scale. Streams start apart: each sublayer reads mostly its `favourite` stream, and
    mixing starts near identity."""
    n = config.hc_mult
    base = torch.zeros((2 + n) * n)
    base[:n] = _PRE_LOGIT_OFF
    base[favourite % n] = _PRE_LOGIT_ON
    base[2 * n :] = (torch.eye(n) * _COMB_DIAGONAL).flatten()
    fn = torch.randn((2 + n) * n, n * config.hidden_size) * 0.02
    return nn.Parameter(fn), nn.Parameter(base), nn.Parameter(torch.full((3,), 0.1))


def collapse_parameters(config: TinyConfig) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    """fn, base, scale of the collapse before a head."""
    n = config.hc_mult
    fn = torch.randn(n, n * config.hidden_size) * 0.02
    base = torch.full((n,), _AVERAGE_LOGIT)
    return nn.Parameter(fn), nn.Parameter(base), nn.Parameter(torch.full((1,), 0.1))


class Block(nn.Module):
    """Attention and MoE, each wrapped in hyper-connections."""

    def __init__(self, config: TinyConfig, ratio: int, hashed: bool, index: int) -> None:
        super().__init__()
        self.config = config
        self.mix, self.write = hyper_mix, hyper_write
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, ratio)
        self.ffn = MoE(config, hashed)
        self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale = hyper_parameters(config, 2 * index)
        self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale = hyper_parameters(
            config, 2 * index + 1
        )

    def forward(self, x_BTND: Tensor, ids_BT: Tensor, chain: list[Tensor] | None = None) -> Tensor:
        batch_tokens = x_BTND.shape[:2]
        x = x_BTND.flatten(
            0, 1
        )  # hyper-connections know no sequence; a fixed row count compiles once
        y, post, comb = self._mix(x, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale)
        f = self.attn(self.attn_norm(y).unflatten(0, batch_tokens), chain)
        x = self.write(x, f.flatten(0, 1), post, comb)
        y, post, comb = self._mix(x, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale)
        x = self.write(x, self.ffn(self.ffn_norm(y), ids_BT.flatten()), post, comb)
        out: Tensor = x.unflatten(0, batch_tokens)
        return out

    def _mix(
        self, x: Tensor, fn: Tensor, base: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        return self.mix(x, fn, base, scale, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)


class NextN(Block):
    """The draft layer: joins the target's streams at t with the token at t+1 and predicts the token at t+2."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config, ratio=0, hashed=False, index=config.num_hidden_layers)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.e_proj = nn.Linear(hidden, hidden, bias=False)
        self.h_proj = nn.Linear(hidden, hidden, bias=False)
        self.enorm, self.hnorm, self.norm = (RMSNorm(hidden, eps) for _ in range(3))
        self.hc_head_fn, self.hc_head_base, self.hc_head_scale = collapse_parameters(config)

    def draft(
        self, embedded_BTD: Tensor, x_BTND: Tensor, ids_BT: Tensor, chain: list[Tensor] | None
    ) -> Tensor:
        """Streams Y [B, T, N, D] from the embedding of the next token and the streams before it."""
        joined = self.e_proj(self.enorm(embedded_BTD)).unsqueeze(2) + self.h_proj(
            self.hnorm(x_BTND)
        )
        y_BTND: Tensor = self(joined, ids_BT, chain)
        return y_BTND


class TinyDeepseekV4(nn.Module):
    """Target layers, heads and NextN layer (`mtp.0`)."""

    def __init__(self, config: TinyConfig, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, ratio, index < config.num_hash_layers, index)
            for index, ratio in enumerate(config.layer_ratios)
        )
        self.hc_head_fn, self.hc_head_base, self.hc_head_scale = collapse_parameters(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = nn.ModuleList([NextN(config)])
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if "hc_" in name or parameter.dim() < 2 or name.endswith("ape"):
                continue
            is_output = name.endswith(("wo_b.weight", "w2.weight"))
            std = 0.02 if name.startswith(("embed", "head")) else parameter.shape[1] ** -0.5
            nn.init.normal_(
                parameter, std=std / (2 * len(self.layers)) ** 0.5 if is_output else std
            )
        nn.init.normal_(self.embed.weight, std=0.5)
        for module in self.modules():
            if isinstance(module, MoE) and module.hashed:
                ids = torch.rand(self.config.vocab_size, self.config.n_routed_experts)
                module.gate.tid2eid.copy_(ids.topk(self.config.num_experts_per_tok).indices)

    def streams(self, ids_BT: Tensor) -> Tensor:
        """Streams X [B, T, N, D] after the last layer."""
        x: Tensor = self.embed(ids_BT).unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1)
        for layer in self.layers:
            x = layer(x, ids_BT)
        return x

    def logits(self, x_BTND: Tensor) -> Tensor:
        """Target logits [B, T, V]."""
        return self._head(self, x_BTND)

    def draft_logits(self, y_BTND: Tensor) -> Tensor:
        """NextN logits [B, T, V]."""
        return self._head(self.nextn, y_BTND)

    def draft(
        self, x_BTND: Tensor, next_ids_BT: Tensor, chain: list[Tensor] | None = None
    ) -> Tensor:
        """One NextN pass; `next_ids_BT[:, t]` is the token at t + 1."""
        return self.nextn.draft(self.embed(next_ids_BT), x_BTND, next_ids_BT, chain)

    @property
    def nextn(self) -> NextN:
        """The draft layer."""
        layer = self.mtp[0]
        assert isinstance(layer, NextN)
        return layer

    def _head(self, owner: TinyDeepseekV4 | NextN, x_BTND: Tensor) -> Tensor:
        c = self.config
        y = hyper_collapse(
            x_BTND,
            owner.hc_head_fn,
            owner.hc_head_base,
            owner.hc_head_scale,
            c.hc_eps,
            c.rms_norm_eps,
        )
        logits_BTV: Tensor = self.head(owner.norm(y))
        return logits_BTV

    def compile(self) -> None:
        """Fuse the hyper-connection arithmetic (a tenth of a step; costs a minute at the start)."""
        mix, write = torch.compile(hyper_mix), torch.compile(hyper_write)
        for module in self.modules():
            if isinstance(module, Block):
                module.mix, module.write = mix, write

    def attentions(self) -> list[Attention]:
        """Every attention sublayer, NextN last."""
        return [m for m in self.modules() if isinstance(m, Attention)]

    def routers(self) -> list[MoE]:
        """Every score-routed MoE."""
        return [m for m in self.modules() if isinstance(m, MoE) and not m.hashed]
