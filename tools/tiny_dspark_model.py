"""The DSPARK draft for training: many blocks of a row at once; `state_dict()` keys are the public names.

Structure: the DSpark paper (arXiv 2607.05147) and its Qwen3 checkpoints; serving has its own code.

Shape suffixes: R rows, T context tokens, A anchors of a row, S drafts a block, D hidden, C captured width,
H query heads, K key/value heads, d head width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.rms_norm import RMSNorm
from tools.tiny_dspark_config import TinyDSparkConfig
from tools.tiny_kimi_model import Mlp, TinyKimi


def _rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary halves: x [R, n, heads, d] at positions [R or 1, n]."""
    half = x.shape[-1] // 2
    freq = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = (positions.unsqueeze(-1) * freq).unsqueeze(2)
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class BlockAttention(nn.Module):
    """Rows of a block see the context before their anchor, and each other."""

    def __init__(self, config: TinyDSparkConfig) -> None:
        super().__init__()
        c, hidden = config, config.hidden_size
        self.config = config
        self.q_proj = nn.Linear(hidden, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, hidden, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(c.head_dim, c.rms_norm_eps) for _ in range(2))

    def forward(
        self, x_RnD: Tensor, position_Rn: Tensor, context_RTD: Tensor, visible_RnM: Tensor
    ) -> Tensor:
        """`visible` covers the T context positions, then the n rows themselves."""
        theta, width = self.config.rope_theta, self.config.head_dim
        position_1T = torch.arange(context_RTD.shape[1]).unsqueeze(0)
        q = self.q_norm(self.q_proj(x_RnD).unflatten(-1, (-1, width)))
        keys, values = [], []
        for rows, positions in ((context_RTD, position_1T), (x_RnD, position_Rn)):
            k = self.k_norm(self.k_proj(rows).unflatten(-1, (-1, width)))
            keys.append(_rotated(k, positions, theta))
            values.append(self.v_proj(rows).unflatten(-1, (-1, width)))
        o = F.scaled_dot_product_attention(
            _rotated(q, position_Rn, theta).transpose(1, 2),
            torch.cat(keys, dim=1).transpose(1, 2),
            torch.cat(values, dim=1).transpose(1, 2),
            attn_mask=visible_RnM.unsqueeze(1),
            enable_gqa=True,
        )
        out: Tensor = self.o_proj(o.transpose(1, 2).flatten(2))
        return out


class DraftLayer(nn.Module):
    """A Qwen3 layer whose keys and values also come from the context."""

    def __init__(self, config: TinyDSparkConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(hidden, eps),
            RMSNorm(hidden, eps),
        )
        self.self_attn = BlockAttention(config)
        self.mlp = Mlp(hidden, config.intermediate_size)

    def forward(
        self, x_RnD: Tensor, position_Rn: Tensor, context_RTD: Tensor, visible_RnM: Tensor
    ) -> Tensor:
        normed = self.input_layernorm(x_RnD)
        x = x_RnD + self.self_attn(normed, position_Rn, context_RTD, visible_RnM)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MarkovHead(nn.Module):
    """The recurrent Markov head: what was drafted before corrects a position's logits."""

    def __init__(self, config: TinyDSparkConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.vocab_size, bias=False)
        self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def step(self, state: Tensor, previous: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(next state, logits to add) of one position; state [.., rank], previous [..], hidden [.., D]."""
        joint = self.joint_proj(torch.cat((state, self.markov_w1(previous), hidden), dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return state, self.markov_w2(torch.tanh(output))

    def start(self, shape: tuple[int, ...]) -> Tensor:
        """The state before a block."""
        return torch.zeros(*shape, self.markov_w2.in_features)


class TinyDSpark(nn.Module):
    """The draft; embeddings and vocabulary are the target's, and stay out of its state dict."""

    def __init__(self, config: TinyDSparkConfig, target: TinyKimi, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.markov_head = MarkovHead(config)
        self._shared = (target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach())
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = parameter.shape[1] ** -0.5
                output = name.endswith(("o_proj.weight", "down_proj.weight", "markov_w2.weight"))
                nn.init.normal_(parameter, std=std / 2 if output else std)

    def context(self, streams: list[Tensor]) -> Tensor:
        """[R, T, D] from the target's streams after each layer."""
        captured = torch.cat([streams[layer] for layer in self.config.target_layer_ids], dim=-1)
        context_RTD: Tensor = self.hidden_norm(self.fc(captured))
        return context_RTD

    def hidden(self, context_RTD: Tensor, ids_RT: Tensor, anchor_RA: Tensor) -> Tensor:
        """Normed rows [R, A, S, D] of the blocks that start at each anchor's position."""
        size, (rows, anchors) = self.config.block_size, anchor_RA.shape
        position_RAS = anchor_RA.unsqueeze(-1) + torch.arange(size)
        ids_RAS = torch.full_like(position_RAS, self.config.mask_token_id)
        ids_RAS[..., 0] = ids_RT.gather(1, anchor_RA)
        before_RAT = torch.arange(context_RTD.shape[1]) < anchor_RA.unsqueeze(-1)
        own = (
            torch.eye(anchors, dtype=torch.bool)
            .repeat_interleave(size, 0)
            .repeat_interleave(size, 1)
        )
        visible = torch.cat(
            (before_RAT.repeat_interleave(size, dim=1), own.expand(rows, -1, -1)), dim=-1
        )
        x = F.embedding(ids_RAS.flatten(1), self._shared[0])
        for layer in self.layers:
            x = layer(x, position_RAS.flatten(1), context_RTD, visible)
        normed: Tensor = self.norm(x).unflatten(1, (anchors, size))
        return normed

    def logits(self, hidden_RASD: Tensor, previous_RAS: Tensor) -> Tensor:
        """[R, A, S, V] when `previous` stands before each position."""
        state, biases = self.markov_head.start(tuple(previous_RAS.shape[:2])), []
        for step in range(hidden_RASD.shape[2]):
            state, bias = self.markov_head.step(
                state, previous_RAS[..., step], hidden_RASD[:, :, step]
            )
            biases.append(bias)
        return F.linear(hidden_RASD, self._shared[1]) + torch.stack(biases, dim=2)

    @torch.no_grad()
    def greedy(self, context_RTD: Tensor, ids_RT: Tensor, anchor_RA: Tensor) -> Tensor:
        """Drafts [R, A, S] by argmax."""
        hidden = self.hidden(context_RTD, ids_RT, anchor_RA)
        base = F.linear(hidden, self._shared[1])
        state, previous = (
            self.markov_head.start(tuple(anchor_RA.shape)),
            ids_RT.gather(1, anchor_RA),
        )
        drafts = []
        for step in range(hidden.shape[2]):
            state, bias = self.markov_head.step(state, previous, hidden[:, :, step])
            previous = (base[:, :, step] + bias).argmax(-1)
            drafts.append(previous)
        return torch.stack(drafts, dim=-1)
