"""KV compression: a closed window of R tokens becomes one entry, by a gated sum per channel.

Shape legend: T tokens, M windows, R compression ratio, S slots pooled a window (R, or 2R with
overlap), C = coff * d projected channels (coff = 2 with overlap, else 1), d entry width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.models.layers.norm import accumulation_dtype, rms_norm
from sluice.models.layers.rope import Rotation, apply_rope


@dataclass(frozen=True)
class CompressorWeights:
    """``wkv``, ``wgate [C, D]``, ``norm [d]``, ``ape [R, C]`` (position bias within a window)."""

    wkv: Tensor
    wgate: Tensor
    norm: Tensor
    ape: Tensor


def project_rows(x_TD: Tensor, weights: CompressorWeights) -> Tensor:
    """What a token gives to its windows: ``[T, 2C]``, values then gates (without ape), float32."""
    wide = accumulation_dtype(x_TD.dtype)
    x_TD = x_TD.to(wide)
    values, gates = F.linear(x_TD, weights.wkv.to(wide)), F.linear(x_TD, weights.wgate.to(wide))
    return torch.cat((values, gates), dim=-1)


def pool_windows(
    rows_MSC: Tensor, weights: CompressorWeights, first_M: Tensor, rotation: Rotation, eps: float
) -> Tensor:
    """Entries ``[M, d]`` of windows whose tokens' rows (from ``project_rows``) are gathered.

    ``rows_MSC [M, S, 2C]`` in position order. S == R pools the window itself; S == 2R also the
    window before: its rows act with their first d channels (what they give to the next window),
    the window's own rows with their last d. ``first_M`` (bool) marks windows with no window before;
    their first R slots are ignored whatever they hold. ``rotation`` is that of each window's first
    token.
    """
    values_MSC, gates_MSC = rows_MSC.chunk(2, dim=-1)
    ratio = weights.ape.shape[0]
    overlaps = rows_MSC.shape[1] == 2 * ratio
    if overlaps:
        ape_RC = weights.ape
        empty_M11 = first_M[:, None, None]
        gates_MSC = gates_MSC + torch.cat((ape_RC, ape_RC))
        gates_MSd = _by_role(gates_MSC, ratio, empty_M11, float("-inf"))
        values_MSd = _by_role(values_MSC, ratio, empty_M11, 0.0)
    else:
        gates_MSd, values_MSd = gates_MSC + weights.ape, values_MSC
    pooled_Md = (torch.softmax(gates_MSd, dim=1) * values_MSd).sum(1)
    return apply_rope(rms_norm(pooled_Md, weights.norm, eps), rotation)


def _by_role(x_MSC: Tensor, ratio: int, empty_M11: Tensor, fill: float) -> Tensor:
    """First channels of the previous window's slots, last channels of the own ones, ``[M, 2R, d]``.

    The fill replaces instead of multiplying, so that garbage in a first window's slots (NaN in a
    poisoned buffer) can't reach the sum.
    """
    give_next, current = x_MSC.chunk(2, dim=-1)
    before_MRd = give_next[:, :ratio].masked_fill(empty_M11, fill)
    return torch.cat((before_MRd, current[:, ratio:]), dim=1)
