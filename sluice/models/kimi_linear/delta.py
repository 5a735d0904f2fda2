"""Kimi Delta Attention's recurrence: token by token, and in chunks (arXiv 2510.26692).

For each head, with state S ``[K, V]``: S <- diag(e^g) S; d = beta (v - S^T k); S <- S + k d^T;
o = S^T q. The decay comes before the correction is computed, and the output after it is written.
The two forms agree in mathematics, not in bits: decoding and verifying both use ``scan``, whose every
operation is elementwise or a sum over K, so that a row's bits depend on neither its neighbours nor on
how many tokens a call takes.

Shape legend: T tokens of one request, R requests side by side, N steps, H heads, K key width,
V value width, c tokens of a chunk. Everything is float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Pairwise decays of a chunk take c*c*K values a head: quadratic here, linear in everything else.
_CHUNK_TOKENS = 16
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Writes:
    """What tokens do to the state; leading dimensions ``[R, N]``, or ``[T]`` for one request.

    ``k [.., H, K]`` (unit length), ``v [.., H, V]``, ``g [.., H, K]`` (log decay, <= 0),
    ``beta [.., H]``. A token with k = 0, g = 0, beta = 0 leaves the state as it is, bit for bit.
    """

    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def __getitem__(self, index: Tensor | slice) -> Writes:
        return Writes(self.k[index], self.v[index], self.g[index], self.beta[index])

    def only(self, real: Tensor) -> Writes:
        """Tokens where ``real`` (bool, leading dimensions) is false no longer do anything."""
        skip = ~real.unsqueeze(-1)
        wide = skip.unsqueeze(-1)
        return Writes(
            k=self.k.masked_fill(wide, 0.0),
            v=self.v.masked_fill(wide, 0.0),
            g=self.g.masked_fill(wide, 0.0),
            beta=self.beta.masked_fill(skip, 0.0),
        )


def unit(x: Tensor) -> Tensor:
    """``x / sqrt(sum x^2 + eps)``: eps inside the root, unlike a clamped norm."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS)


def scan(state_RHKV: Tensor, writes: Writes, q_RNHK: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The recurrence, step by step: (state after the last step, outputs ``[R, N, H, V]``).

    Without queries only the state is computed, by the same operations.
    """
    decay = writes.g.exp()
    outputs = []
    for step in range(writes.k.shape[1]):
        k_RHK1 = writes.k[:, step].unsqueeze(-1)
        state_RHKV = state_RHKV * decay[:, step].unsqueeze(-1)
        seen_RHV = (state_RHKV * k_RHK1).sum(-2)
        change_RHV = (writes.v[:, step] - seen_RHV) * writes.beta[:, step].unsqueeze(-1)
        state_RHKV = state_RHKV + k_RHK1 * change_RHV.unsqueeze(-2)
        if q_RNHK is not None:
            outputs.append((state_RHKV * q_RNHK[:, step].unsqueeze(-1)).sum(-2))
    return state_RHKV, torch.stack(outputs, dim=1) if outputs else None


def chunked(state_HKV: Tensor, writes: Writes, q_THK: Tensor) -> tuple[Tensor, Tensor]:
    """The same for one request's many tokens: (state after the last, outputs ``[T, H, V]``)."""
    outputs = []
    for first in range(0, q_THK.shape[0], _CHUNK_TOKENS):
        some = slice(first, first + _CHUNK_TOKENS)
        state_HKV, out_HcV = _chunk(state_HKV, writes[some], q_THK[some])
        outputs.append(out_HcV)
    return state_HKV, torch.cat(outputs, dim=1).transpose(0, 1)


def _chunk(state_HKV: Tensor, writes: Writes, q_cHK: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk: the corrections of all its tokens at once, by one triangular solve.

    With G the running sum of g, token i sees token j < i through e^(G_i - G_j). Only such differences
    are exponentiated: they are <= 0, where e^-G alone overflows.
    """
    q, k, v, g = (x.transpose(0, 1) for x in (q_cHK, writes.k, writes.v, writes.g))
    beta_Hc1 = writes.beta.T.unsqueeze(-1)
    total_HcK = g.cumsum(dim=1)
    grown_HcK = total_HcK.exp()
    seen_Hcc, own_Hcc = _pairs(q, k, total_HcK)
    # d_i = beta_i (v_i - S^T k_i e^{G_i} - sum_{j<i} <k_i, k_j e^{G_i - G_j}> d_j)
    wanted_HcV = beta_Hc1 * (v - (k * grown_HcK) @ state_HKV)
    # The solver takes the diagonal for ones and reads nothing above it.
    change_HcV = torch.linalg.solve_triangular(
        beta_Hc1 * own_Hcc, wanted_HcV, upper=False, unitriangular=True
    )
    out_HcV = (q * grown_HcK) @ state_HKV + seen_Hcc @ change_HcV
    left_HcK = (total_HcK[:, -1:] - total_HcK).exp()
    kept_HKV = state_HKV * grown_HcK[:, -1].unsqueeze(-1)
    return kept_HKV + (k * left_HcK).transpose(1, 2) @ change_HcV, out_HcV


def _pairs(q_HcK: Tensor, k_HcK: Tensor, total_HcK: Tensor) -> tuple[Tensor, Tensor]:
    """Decayed products of token i with tokens j: of its query, and of its key; 0 where j > i."""
    count = k_HcK.shape[1]
    later = torch.ones(count, count, dtype=torch.bool, device=k_HcK.device).triu(1)
    gap_HccK = total_HcK.unsqueeze(2) - total_HcK.unsqueeze(1)
    gap_HccK = gap_HccK.masked_fill(later.unsqueeze(-1), float("-inf"))
    reach_HccK = gap_HccK.exp() * k_HcK.unsqueeze(1)
    seen_Hcc = (reach_HccK @ q_HcK.unsqueeze(-1)).squeeze(-1)
    own_Hcc = (reach_HccK @ k_HcK.unsqueeze(-1)).squeeze(-1)
    return seen_Hcc, own_Hcc
