"""DSPARK once more, from its description, without a cache: loops over tokens and heads in float64.

Reads raw config values and raw tensors by their checkpoint names. Nothing here is shared with the
implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight.double()


def _turned(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary halves: channel i and channel i + d/2 turn by position * theta^(-2i/d)."""
    half = len(x) // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        a, b = float(x[i]), float(x[i + half])
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


class NaiveDraft:
    """``embed`` and ``head`` are the target's tables."""

    def __init__(self, raw: Mapping[str, object], tensors: Tensors, embed: Tensor, head: Tensor):
        self.t = {name: tensor.double() for name, tensor in tensors.items()}
        self.embed, self.head = embed.double(), head.double()
        number: Callable[[str], int] = lambda key: int(raw[key])  # type: ignore[call-overload] # noqa: E731
        self.heads, self.kv_heads = number("num_attention_heads"), number("num_key_value_heads")
        self.width, self.layers = number("head_dim"), number("num_hidden_layers")
        self.block, self.mask = number("block_size"), number("mask_token_id")
        self.eps = float(raw["rms_norm_eps"])  # type: ignore[arg-type]
        self.theta = float(raw["rope_theta"])  # type: ignore[arg-type]
        self.from_anchor = bool(raw.get("sample_from_anchor", True))
        self.causal = bool(raw.get("is_causal", False))
        self.kind = str(raw["markov_head_type"])

    def hidden(self, streams: Tensor, anchor: int, first_context: int = 0) -> list[Tensor]:
        """The block's normed rows that guess tokens L+1 .. L+block, from the whole context."""
        length = len(streams)
        contexts = {
            p: _norm(
                self.t["fc.weight"] @ streams[p].double(), self.t["hidden_norm.weight"], self.eps
            )
            for p in range(first_context, length)
        }
        rows = self.block if self.from_anchor else self.block + 1
        x = [self.embed[anchor if j == 0 else self.mask] for j in range(rows)]
        for layer in range(self.layers):
            x = self._layer(f"layers.{layer}", x, contexts, length)
        out = [_norm(row, self.t["norm.weight"], self.eps) for row in x]
        return out if self.from_anchor else out[1:]

    def _layer(
        self, name: str, x: list[Tensor], contexts: Mapping[int, Tensor], length: int
    ) -> list[Tensor]:
        normed = [_norm(row, self.t[f"{name}.input_layernorm.weight"], self.eps) for row in x]
        keys = [self._key_value(name, source, p) for p, source in contexts.items()]
        block = [self._key_value(name, row, length + j) for j, row in enumerate(normed)]
        out = []
        for j, row in enumerate(normed):
            seen = keys + (block[: j + 1] if self.causal else block)
            row_out = x[j] + self._attend(name, row, length + j, seen)
            mlp_in = _norm(row_out, self.t[f"{name}.post_attention_layernorm.weight"], self.eps)
            gate = self.t[f"{name}.mlp.gate_proj.weight"] @ mlp_in
            up = self.t[f"{name}.mlp.up_proj.weight"] @ mlp_in
            inner = gate / (1 + torch.exp(-gate)) * up
            out.append(row_out + self.t[f"{name}.mlp.down_proj.weight"] @ inner)
        return out

    def _key_value(self, name: str, x: Tensor, position: int) -> tuple[list[Tensor], list[Tensor]]:
        k = (self.t[f"{name}.self_attn.k_proj.weight"] @ x).split(self.width)
        v = (self.t[f"{name}.self_attn.v_proj.weight"] @ x).split(self.width)
        norm = self.t[f"{name}.self_attn.k_norm.weight"]
        return [_turned(_norm(h, norm, self.eps), position, self.theta) for h in k], list(v)

    def _attend(
        self, name: str, x: Tensor, position: int, seen: Sequence[tuple[list[Tensor], list[Tensor]]]
    ) -> Tensor:
        q = (self.t[f"{name}.self_attn.q_proj.weight"] @ x).split(self.width)
        norm = self.t[f"{name}.self_attn.q_norm.weight"]
        out = []
        for head, query in enumerate(q):
            query = _turned(_norm(query, norm, self.eps), position, self.theta)
            shared = head // (self.heads // self.kv_heads)
            scores = torch.stack([query @ k[shared] for k, _ in seen]) / math.sqrt(self.width)
            weights = torch.softmax(scores, dim=0)
            out.append(sum(w * v[shared] for w, (_, v) in zip(weights, seen, strict=True)))
        return self.t[f"{name}.self_attn.o_proj.weight"] @ torch.cat(out)

    def corrected(self, hidden: Sequence[Tensor], previous: Sequence[int]) -> list[Tensor]:
        """Logits of each position when ``previous[j]`` stands just before it."""
        w1, w2 = self.t["markov_head.markov_w1.weight"], self.t["markov_head.markov_w2.weight"]
        rank = w1.shape[1]
        state, out = torch.zeros(rank, dtype=torch.float64), []
        for h, token in zip(hidden, previous, strict=False):
            e = w1[token]
            if self.kind == "vanilla":
                latent = e
            elif self.kind == "gated":
                raw = self.t["markov_head.gate_proj.weight"] @ torch.cat([h, e])
                latent = e * torch.sigmoid(raw + self.t["markov_head.gate_proj.bias"])
            else:
                raw = self.t["markov_head.joint_proj.weight"] @ torch.cat([state, e, h])
                raw = raw + self.t["markov_head.joint_proj.bias"]
                gate, candidate, output = raw[:rank], raw[rank : 2 * rank], raw[2 * rank :]
                gate = torch.sigmoid(gate)
                state = gate * state + (1 - gate) * torch.tanh(candidate)
                latent = torch.tanh(output)
            out.append(self.head @ h + w2 @ latent)
        return out

    def greedy(self, streams: Tensor, anchor: int, first_context: int = 0) -> list[int]:
        """The block's drafts by argmax."""
        hidden = self.hidden(streams, anchor, first_context)
        drafts: list[int] = []
        for _ in range(self.block):
            logits = self.corrected(hidden, [anchor, *drafts])
            drafts.append(int(logits[len(drafts)].argmax()))
        return drafts
