"""Sampling many rows from the small Kimi model, token by token.

Shape suffixes: B rows, T tokens, D hidden, H heads, K key width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny_kimi_model import Block, KdaAttention, MlaAttention, TinyKimi


class RecurrentRows:
    """A KDA layer's state of B rows: raw convolution inputs and the delta rule's matrices."""

    def __init__(self, layer: KdaAttention, rows: int) -> None:
        self.layer = layer
        self.window = torch.zeros(rows, layer.taps, 3 * layer.width)
        self.state = torch.zeros(rows, layer.heads, layer.dim, layer.dim)

    def step(self, x_BD: Tensor) -> Tensor:
        """[B, D] for the next token of every row."""
        layer = self.layer
        self.window = torch.cat((self.window[:, 1:], layer.projected(x_BD).unsqueeze(1)), dim=1)
        q, k, v = layer.heads_of(F.silu((self.window * layer.kernel()).sum(1)))
        g, beta = layer.gates(x_BD)
        state = self.state * g.exp().unsqueeze(-1)
        seen = (k.unsqueeze(-2) @ state).squeeze(-2)
        change = (v - seen) * beta.unsqueeze(-1)
        self.state = torch.addcmul(state, k.unsqueeze(-1), change.unsqueeze(-2))
        return layer.output(x_BD, (q.unsqueeze(-2) @ self.state).squeeze(-2))


class LatentRows:
    """An MLA layer's keys and values of B rows."""

    def __init__(self, layer: MlaAttention, rows: int, tokens: int) -> None:
        c = layer.config
        shape, key = (rows, c.num_attention_heads, tokens), c.qk_nope_head_dim + c.qk_rope_head_dim
        self.layer, self.count = layer, 0
        self.keys, self.values = torch.zeros(*shape, key), torch.zeros(*shape, c.v_head_dim)

    def step(self, x_BD: Tensor) -> Tensor:
        """[B, D] for the next token of every row."""
        q, self.keys[:, :, self.count], self.values[:, :, self.count] = self.layer.heads_of(x_BD)
        self.count += 1
        o = F.scaled_dot_product_attention(
            q.unsqueeze(2), self.keys[:, :, : self.count], self.values[:, :, : self.count]
        )
        out: Tensor = self.layer.o_proj(o.flatten(1))
        return out


@torch.no_grad()
def continue_rows(
    model: TinyKimi, prompt_BT: Tensor, length: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """Rows of `length` tokens that start with their prompts; BOS may follow as any other token."""
    rows = len(prompt_BT)
    blocks = model.blocks()
    memory = [_memory(block, rows, length) for block in blocks]
    ids = [prompt_BT[:, t] for t in range(prompt_BT.shape[1])]
    for t in range(length - 1):
        x = model.model.embed_tokens(ids[t])
        for layer, state in zip(blocks, memory, strict=True):
            x = layer.feed(x + state.step(layer.input_layernorm(x)))
        if t == len(ids) - 1:
            ids.append(_choose_rows(model.logits(x), temperature, generator))
    return torch.stack(ids, dim=1)


def _memory(block: Block, rows: int, tokens: int) -> RecurrentRows | LatentRows:
    attention = block.self_attn
    if isinstance(attention, KdaAttention):
        return RecurrentRows(attention, rows)
    return LatentRows(attention, rows, tokens)


def _choose_rows(logits_BV: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(-1)
    probabilities = torch.softmax(logits_BV / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
