"""Dense attention of the small DeepSeek-V4 model: window, compressed entries and sink in one softmax.

Shape suffixes: B batch, T tokens (multiple of the window W), H heads, d head_dim, E compressed entries,
C blocks of W tokens, W window, S keys a query sees.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.rms_norm import RMSNorm
from tools.tiny_dsv4_config import TinyConfig
from tools.tiny_dsv4_layers import NEG_INF, Compressor, Indexer, Rope, rms


class Attention(nn.Module):
    """One attention sublayer; `ratio` 0, 4 (indexed) or 128."""

    def __init__(self, config: TinyConfig, ratio: int) -> None:
        super().__init__()
        self.config, self.ratio = config, ratio
        hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.wq_a = nn.Linear(hidden, config.q_lora_rank, bias=False)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = nn.Linear(config.q_lora_rank, heads * dim, bias=False)
        self.wkv = nn.Linear(hidden, dim, bias=False)
        self.kv_norm = RMSNorm(dim, config.rms_norm_eps)
        self.wo_a = nn.Linear(
            heads * dim // config.o_groups, config.o_groups * config.o_lora_rank, bias=False
        )
        self.wo_b = nn.Linear(config.o_groups * config.o_lora_rank, hidden, bias=False)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.rope = Rope(config, compressed=ratio > 0)
        if ratio:
            self.compressor = Compressor(config, ratio, dim)
        if ratio == 4:
            self.indexer = Indexer(config)
        self.select = True
        self.index_rows = 0
        self.index_loss: Tensor | None = None

    def forward(self, x_BTD: Tensor, chain: list[Tensor] | None = None) -> Tensor:
        """Attend densely. `chain` (NextN drafting only) holds window keys of earlier draft steps, newest last,
        and receives this step's; see `_chain_scores`."""
        tokens = x_BTD.shape[1]
        positions = torch.arange(tokens, device=x_BTD.device)
        qr = self.q_norm(self.wq_a(x_BTD))
        q = self.wq_b(qr).unflatten(-1, (self.config.num_attention_heads, self.config.head_dim))
        q_BTHd = self.rope(rms(q, self.config.rms_norm_eps), positions)
        kv_BTd = self.rope(self.kv_norm(self.wkv(x_BTD)), positions)
        keys = _KeySets(self, q_BTHd * self.config.head_dim**-0.5)
        depth = len(chain) if chain is not None else 0
        keys.add_window(kv_BTd if depth == 0 or chain is None else chain[0], skip=depth)
        if chain is not None:
            for age, kv in enumerate([*chain[1:], kv_BTd][::-1] if depth else []):
                keys.add_own(_delayed(kv, age))
            chain.append(kv_BTd)
        if self.ratio:
            self._add_entries(keys, x_BTD, qr)
        o_BTHd = self.rope(keys.attend(), positions, inverse=True)
        return self._project(o_BTHd)

    def _add_entries(self, keys: _KeySets, x_BTD: Tensor, qr: Tensor) -> None:
        tokens = x_BTD.shape[1]
        entries_BEd = self.compressor(x_BTD, self.rope)
        count = entries_BEd.shape[1]
        if count == 0:
            return
        closed_T = (torch.arange(tokens, device=x_BTD.device) + 1) // self.ratio
        visible_TE = torch.arange(count, device=x_BTD.device) < closed_T[:, None]
        allowed = visible_TE
        scores: Tensor | None = None
        if self.ratio == 4:
            rows = slice(0, self.index_rows if self.index_rows else None)
            # Train the indexer on a few rows only: it is as dear as the attention.
            if self.index_rows:
                scores = self.indexer(x_BTD[rows].detach(), qr[rows].detach(), self.rope)
            if self.select and count > self.config.index_topk:
                with torch.no_grad():
                    ranked = self.indexer(x_BTD, qr, self.rope).masked_fill(~visible_TE, NEG_INF)
                    best = ranked.topk(self.config.index_topk, dim=-1).indices
                    chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, best, True)
                allowed = chosen & visible_TE
        keys.add_entries(entries_BEd, allowed)
        if scores is not None:
            self.index_loss = keys.index_loss(scores, visible_TE, self.index_rows)

    def _project(self, o_BTHd: Tensor) -> Tensor:
        groups, rank = self.config.o_groups, self.config.o_lora_rank
        grouped = o_BTHd.flatten(-2).unflatten(-1, (groups, -1))
        weight = self.wo_a.weight.unflatten(0, (groups, rank))
        parts = [F.linear(grouped[..., g, :], weight[g]) for g in range(groups)]
        out: Tensor = self.wo_b(torch.cat(parts, dim=-1))
        return out


class _KeySets:
    """Collects score blocks over several key sets, then does one joint softmax with the sink."""

    def __init__(self, layer: Attention, q_BTHd: Tensor) -> None:
        self.layer, self.q = layer, q_BTHd
        self.scores: list[Tensor] = []
        self.values: list[tuple[str, Tensor]] = []

    def add_window(self, kv_BTd: Tensor, skip: int) -> None:
        """The last W rows including the query's own, minus the newest `skip` rows."""
        window = self.layer.config.sliding_window
        blocks = kv_BTd.unflatten(1, (-1, window))
        previous = F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0))
        keys_BCSd = torch.cat((previous, blocks), dim=2)
        batch, tokens, heads, dim = self.q.shape
        q = self.q.reshape(batch, tokens // window, window * heads, dim)
        scores = (q @ keys_BCSd.transpose(-1, -2)).view(batch, -1, window, heads, 2 * window)
        age = torch.arange(window)[:, None] + window - torch.arange(2 * window)[None]
        hidden = (age >= window) | (age < skip)
        first = hidden | (torch.arange(2 * window)[None] < window)
        mask = hidden.expand(tokens // window, -1, -1).clone()
        mask[0] = first
        scores = scores.masked_fill(mask[None, :, :, None, :].to(scores.device), NEG_INF)
        self.scores.append(scores.reshape(batch, tokens, heads, 2 * window))
        self.values.append(("window", keys_BCSd))

    def add_own(self, kv_BTd: Tensor) -> None:
        """One key a query: row t of `kv_BTd` belongs to query t."""
        self.scores.append((self.q * kv_BTd.unsqueeze(2)).sum(-1, keepdim=True))
        self.values.append(("own", kv_BTd))

    def add_entries(self, entries_BEd: Tensor, allowed: Tensor) -> None:
        """Compressed entries; `allowed` is [T, E] or [B, T, E]."""
        batch, tokens, heads, dim = self.q.shape
        scores = self.q.reshape(batch, tokens * heads, dim) @ entries_BEd.transpose(1, 2)
        scores = scores.view(batch, tokens, heads, -1).masked_fill(~allowed.unsqueeze(-2), NEG_INF)
        self.scores.append(scores)
        self.values.append(("entries", entries_BEd))

    def attend(self) -> Tensor:
        """Weighted sum of all values, [B, T, H, d]; the sink takes part only in the denominator."""
        batch, tokens, heads, dim = self.q.shape
        sink = self.layer.attn_sink.view(1, 1, -1, 1).expand(batch, tokens, heads, 1)
        probs = torch.softmax(torch.cat([*self.scores, sink], dim=-1), dim=-1)
        out: Tensor | None = None
        at = 0
        for (kind, value), score in zip(self.values, self.scores, strict=True):
            p = probs[..., at : at + score.shape[-1]]
            at += score.shape[-1]
            if kind == "window":
                blocks = value.shape[1]
                part = p.reshape(batch, blocks, -1, p.shape[-1]) @ value
            elif kind == "entries":
                part = p.reshape(batch, tokens * heads, -1) @ value
            else:
                part = p * value.unsqueeze(2)
            part = part.reshape(batch, tokens, heads, dim)
            out = part if out is None else out + part
        assert out is not None
        return out

    def index_loss(self, index_scores: Tensor, visible_TE: Tensor, rows: int) -> Tensor:
        """KL from the head-summed attention over visible entries to the indexer's softmax, mean per token."""
        with torch.no_grad():
            _, tokens, heads, dim = self.q.shape
            entries = self.values[-1][1][:rows]
            raw = self.q[:rows].reshape(rows, tokens * heads, dim) @ entries.transpose(1, 2)
            raw = raw.view(rows, tokens, heads, -1).masked_fill(~visible_TE[:, None], NEG_INF)
            # The window and the sink share the softmax, so a head that looks elsewhere weighs less.
            other = torch.cat(
                [s[:rows] for s in self.scores[:-1]]
                + [self.layer.attn_sink.view(1, 1, -1, 1).expand(rows, tokens, heads, 1)],
                dim=-1,
            )
            joint = torch.softmax(torch.cat([other, raw], dim=-1), dim=-1)[..., other.shape[-1] :]
            target = joint.sum(2)
            target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
            seen = visible_TE.any(-1)
        log_p = torch.log_softmax(index_scores.masked_fill(~visible_TE, NEG_INF), dim=-1)
        cross = -(target * log_p).sum(-1)
        entropy = -(target * target.clamp_min(1e-9).log()).sum(-1)
        return (cross - entropy)[:, seen].mean()


def _delayed(x_BTd: Tensor, steps: int) -> Tensor:
    """Rows moved `steps` positions later; zeros enter at the front (those queries are not trained)."""
    return x_BTd if steps == 0 else F.pad(x_BTd[:, :-steps], (0, 0, steps, 0))
