"""The small Kimi Linear model for training; `state_dict()` keys are the published tensor names.

Formulas: arXiv 2510.26692 and transformers' `kimi_linear`; serving has its own code.

Shape suffixes: B rows, T tokens, D hidden, H heads, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.rms_norm import RMSNorm
from tools.tiny_kimi_config import TinyKimiConfig
from tools.tiny_kimi_delta import CHUNK_TOKENS, delta_chunks, delta_scan

_NORM_EPS = 1e-6
# log(1 / half-life) at the start, spread over key channels: memories of 3 to 300 tokens.
_DECAY_SPREAD = (-5.8, -1.2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


class KdaAttention(nn.Module):
    """Recurrent layer: short convolution, then the delta rule with a decay of each key channel."""

    def __init__(self, config: TinyKimiConfig) -> None:
        super().__init__()
        hidden, self.heads, dim = (
            config.hidden_size,
            config.linear_num_heads,
            config.linear_head_dim,
        )
        self.width, self.dim, self.taps = self.heads * dim, dim, config.conv_width
        for name in "qkv":
            self.register_module(f"{name}_proj", nn.Linear(hidden, self.width, bias=False))
            conv = nn.Conv1d(self.width, self.width, self.taps, groups=self.width, bias=False)
            self.register_module(f"{name}_conv1d", conv)
        self.f_a_proj, self.g_a_proj = (nn.Linear(hidden, dim, bias=False) for _ in range(2))
        self.f_b_proj, self.g_b_proj = (nn.Linear(dim, self.width, bias=False) for _ in range(2))
        self.b_proj = nn.Linear(hidden, self.heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(1, 1, self.heads, 1))
        self.dt_bias = nn.Parameter(torch.linspace(*_DECAY_SPREAD, dim).repeat(self.heads))
        self.o_norm = RMSNorm(dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(self.width, hidden, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        rows = F.pad(self.projected(x_BTD), (0, 0, self.taps - 1, 0))
        kernel, count = self.kernel(), x_BTD.shape[1]
        mixed = rows[:, :count] * kernel[0]
        for tap in range(1, self.taps):
            mixed = torch.addcmul(mixed, rows[:, tap : tap + count], kernel[tap])
        q, k, v = self.heads_of(F.silu(mixed))
        g, beta = self.gates(x_BTD)
        whole = self.training and count % CHUNK_TOKENS == 0
        return self.output(x_BTD, (delta_chunks if whole else delta_scan)(q, k, v, g, beta))

    def projected(self, x: Tensor) -> Tensor:
        """Convolution inputs [.., 3 * width]: query, key, value."""
        projections = [self.get_submodule(f"{name}_proj") for name in "qkv"]
        return F.linear(x, torch.cat([p.weight for p in projections]))  # type: ignore[misc]

    def kernel(self) -> Tensor:
        """Convolution taps [taps, 3 * width], the newest token's last."""
        convolutions = [self.get_submodule(f"{name}_conv1d") for name in "qkv"]
        return torch.cat([c.weight for c in convolutions]).squeeze(1).T  # type: ignore[misc]

    def heads_of(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value [.., H, K] of convolved channels."""
        q, k, v = mixed.unflatten(-1, (3, self.heads, self.dim)).unbind(-3)
        return _unit(q) * self.dim**-0.5, _unit(k), v

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay [.., H, K] (<= 0) and write strength [.., H]."""
        raw = self.f_b_proj(self.f_a_proj(x)) + self.dt_bias
        rate = self.A_log.exp().view(self.heads, 1)
        g = -rate * F.softplus(raw).unflatten(-1, (self.heads, self.dim))
        return g, torch.sigmoid(self.b_proj(x))

    def output(self, x: Tensor, o: Tensor) -> Tensor:
        """[.., D] from the heads' outputs [.., H, V], normed and gated."""
        gate = torch.sigmoid(self.g_b_proj(self.g_a_proj(x)))
        out: Tensor = self.o_proj(self.o_norm(o).flatten(-2) * gate)
        return out


class MlaAttention(nn.Module):
    """Multi-head latent attention without positions; the shared key part is never rotated."""

    def __init__(self, config: TinyKimiConfig) -> None:
        super().__init__()
        c, hidden = config, config.hidden_size
        self.config = config
        key = c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_proj = nn.Linear(hidden, c.num_attention_heads * key, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        up = c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, up, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.v_head_dim, hidden, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, key, value = (x.transpose(1, 2) for x in self.heads_of(x_BTD))
        o = F.scaled_dot_product_attention(q, key, value, is_causal=True)
        out: Tensor = self.o_proj(o.transpose(1, 2).flatten(2))
        return out

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value [.., H, width]."""
        c, heads = self.config, self.config.num_attention_heads
        q = self.q_proj(x).unflatten(-1, (heads, -1))
        latent, shared = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        up = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1))
        key, value = up.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        shared = shared.unsqueeze(-2).expand(*key.shape[:-1], -1)
        return q, torch.cat((key, shared), dim=-1), value


class Mlp(nn.Module):
    """down(silu(gate x) * up x); also the shared expert."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Expert(nn.Module):
    """A routed expert, with the published names of its matrices."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Gate(nn.Module):
    """Router weights; the bias moves selection only, and not by gradient."""

    e_score_correction_bias: Tensor

    def __init__(self, config: TinyKimiConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))


class SparseMoe(nn.Module):
    """Top-k of biased sigmoid scores, weights renormalised and scaled, plus one shared expert."""

    load: Tensor

    def __init__(self, config: TinyKimiConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.config = config
        self.gate = Gate(config)
        self.experts = nn.ModuleList(Expert(hidden, inner) for _ in range(config.num_experts))
        self.shared_experts = Mlp(hidden, inner)
        self.register_buffer("load", torch.zeros(config.num_experts), persistent=False)

    def forward(self, any_shape: Tensor) -> Tensor:
        c, x = self.config, any_shape.flatten(0, -2)
        scores = torch.sigmoid(F.linear(x, self.gate.weight))
        biased = scores.detach() + self.gate.e_score_correction_bias
        chosen = biased.topk(c.num_experts_per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * c.routed_scaling_factor
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=c.num_experts)
        if self.training:
            self.load = counts.float()
        token = order // c.num_experts_per_token
        rows = x.index_select(0, token).split(counts.tolist())
        routed = torch.cat([e(r) for e, r in zip(self.experts, rows, strict=True)])
        routed = routed * weights.flatten().index_select(0, order).unsqueeze(-1)
        out: Tensor = self.shared_experts(x).index_add(0, token, routed)
        return out.view_as(any_shape)


class Block(nn.Module):
    """Token mixing and MLP with residuals; the MLP's name depends on its kind, as published."""

    def __init__(self, config: TinyKimiConfig, layer: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(hidden, eps),
            RMSNorm(hidden, eps),
        )
        mla = layer in config.mla_layers
        self.self_attn: MlaAttention | KdaAttention
        self.self_attn = MlaAttention(config) if mla else KdaAttention(config)
        self.dense = layer < config.first_k_dense_replace
        if self.dense:
            self.mlp = Mlp(hidden, config.intermediate_size)
        else:
            self.block_sparse_moe = SparseMoe(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.feed(x_BTD + self.self_attn(self.input_layernorm(x_BTD)))

    def feed(self, x: Tensor) -> Tensor:
        """Adds the MLP."""
        mlp = self.mlp if self.dense else self.block_sparse_moe
        out: Tensor = x + mlp(self.post_attention_layernorm(x))
        return out


class Backbone(nn.Module):
    """Everything the published names put below `model.`."""

    def __init__(self, config: TinyKimiConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class TinyKimi(nn.Module):
    """The target: streams after every layer, and logits."""

    def __init__(self, config: TinyKimiConfig, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        depth = (2 * self.config.num_hidden_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() != 2:
                continue
            output = name.endswith(("o_proj.weight", "w2.weight", "down_proj.weight"))
            std = 0.02 if name.startswith("lm_head") else parameter.shape[1] ** -0.5
            nn.init.normal_(parameter, std=std / depth if output else std)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.5)
        for module in self.modules():
            if isinstance(module, nn.Conv1d):  # starts near "this token"
                nn.init.normal_(module.weight, std=0.2)
                module.weight.data[..., -1] += 1.0

    def streams(self, ids_BT: Tensor) -> list[Tensor]:
        """Residual stream [B, T, D] after each layer; that of the last is before the final norm."""
        x: Tensor = self.model.embed_tokens(ids_BT)
        out = []
        for layer in self.model.layers:
            x = layer(x)
            out.append(x)
        return out

    def logits(self, last_BTD: Tensor) -> Tensor:
        """[B, T, V] from the stream after the last layer."""
        logits_BTV: Tensor = self.lm_head(self.model.norm(last_BTD))
        return logits_BTV

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        return self.logits(self.streams(ids_BT)[-1])

    def blocks(self) -> list[Block]:
        """The layers in order."""
        return [m for m in self.model.layers if isinstance(m, Block)]

    def routers(self) -> list[SparseMoe]:
        """Every MoE."""
        return [m for m in self.modules() if isinstance(m, SparseMoe)]
