"""Log-probabilities of tokens and of the best alternatives, under the model's own distribution.

Suffixes: R rows, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sluice.types import Logprobs, TokenLogprob


def score(logits_RV: Tensor, token_ids: Sequence[int], alternatives: int) -> tuple[Logprobs, ...]:
    """One entry a row: token i's natural-log probability by row i, and the ``alternatives`` best tokens."""
    assert logits_RV.shape[0] == len(token_ids)
    logprobs_RV = torch.log_softmax(logits_RV.to(torch.float32), dim=-1)
    ids_R1 = torch.tensor(token_ids, dtype=torch.int64, device=logits_RV.device)[:, None]
    own: list[float] = logprobs_RV.gather(1, ids_R1)[:, 0].tolist()
    best_RK, best_ids_RK = logprobs_RV.topk(min(alternatives, logits_RV.shape[1]), dim=-1)
    return tuple(
        Logprobs(value, tuple(TokenLogprob(*pair) for pair in zip(ids, best, strict=True)))
        for value, ids, best in zip(own, best_ids_RK.tolist(), best_RK.tolist(), strict=True)
    )
