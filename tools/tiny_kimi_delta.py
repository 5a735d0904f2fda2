"""Kimi Delta Attention for training: chunks with autograd, and token by token as the reference.

For each head, with state S [K, V]: S <- diag(e^g) S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q
(Kimi Linear, arXiv 2510.26692).

Shape suffixes: B rows, T tokens, H heads, K key width, V value width, n chunks, c tokens of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_TOKENS = 16
# Chunks multiply e^G by e^-G, which must stay finite over a chunk: 16 * 5 = 80 < 88. e^-5 is 0.7 %.
MIN_LOG_DECAY = -5.0


def delta_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Outputs [B, T, H, V], token by token and exact; q, k, g [B, T, H, K], v [.., V], beta [B, T, H]."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    decay, outputs = g.exp(), []
    for t in range(q.shape[1]):
        key = k[:, t].unsqueeze(-1)
        state = state * decay[:, t].unsqueeze(-1)
        change = (v[:, t] - (state * key).sum(-2)) * beta[:, t].unsqueeze(-1)
        state = state + key * change.unsqueeze(-2)
        outputs.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outputs, dim=1)


def delta_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The same in chunks; T must divide by the chunk, and decays below e^-5 count as e^-5."""
    q, k, v, g, beta = (_chunked(x) for x in (q, k, v, g, beta.unsqueeze(-1)))
    total = g.clamp(min=MIN_LOG_DECAY).cumsum(dim=-2)
    grown = total.exp()
    q_in, k_in, k_out = q * grown, k * grown, k * (-total).exp()
    last = grown[..., -1:, :]
    k_left = k_out * last
    lower = torch.ones(CHUNK_TOKENS, CHUNK_TOKENS).tril()
    own = (k_in @ k_out.mT) * (lower - torch.eye(CHUNK_TOKENS)) * beta
    seen = (q_in @ k_out.mT) * lower
    # With S the state before the chunk, the corrections are d = u - w S.
    both = torch.cat((v, k_in), dim=-1) * beta
    solved = torch.linalg.solve_triangular(
        own + torch.eye(CHUNK_TOKENS), both, upper=False, unitriangular=True
    )
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    carry = last.mT
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    changes, inputs = [], []
    for n in range(q.shape[2]):
        inputs.append(state)
        change = torch.baddbmm(
            u[:, :, n].flatten(0, 1), w[:, :, n].flatten(0, 1), state.flatten(0, 1), alpha=-1
        )
        moved = (state * carry[:, :, n]).flatten(0, 1)
        state = torch.baddbmm(moved, k_left[:, :, n].flatten(0, 1).mT, change).view_as(state)
        changes.append(change.view(*q.shape[:2], *change.shape[1:]))
    out = q_in @ torch.stack(inputs, dim=2) + seen @ torch.stack(changes, dim=2)
    return out.flatten(2, 3).transpose(1, 2)


def _chunked(x_BTHd: Tensor) -> Tensor:
    """[B, H, n, c, d]."""
    chunks: Tensor = x_BTHd.transpose(1, 2).unflatten(2, (-1, CHUNK_TOKENS))
    return chunks.contiguous()
