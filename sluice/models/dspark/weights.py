"""The weights of a DSPARK draft, read by the names of the public Qwen3 DSPARK checkpoints.

Shapes: D the draft's hidden size, E the target's, C captured layers, V vocabulary, R Markov rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sluice.models.dspark.config import DSparkConfig, MarkovKind
from sluice.models.dspark.markov import MarkovWeights
from sluice.models.llama.weights import LayerWeights, read_layer
from sluice.models.loader import TensorSource
from sluice.parallel.group import SINGLE, Parallel

# Copies of the target's tables, and frequencies that config.json gives.
_SHARED = ("embed_tokens.", "lm_head.", "rotary_emb.")


@dataclass(frozen=True)
class ConfidenceWeights:
    """``proj [1, D]``, or ``[1, D + R]`` with the previous token's embedding; ``bias [1]``."""

    proj: Tensor
    bias: Tensor


@dataclass(frozen=True)
class DSparkWeights:
    """The draft's own tensors. ``fc [D, C * E]`` and ``hidden_norm [D]`` turn captured streams into the
    context; ``norm [D]`` comes before the target's vocabulary.
    """

    fc: Tensor
    hidden_norm: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    markov: MarkovWeights
    confidence: ConfidenceWeights | None


def canonical_name(name: str) -> str:
    """Names with and without the leading ``model.`` mean the same."""
    return name.removeprefix("model.")


def is_shared(name: str) -> bool:
    """Stored tensors that aren't the draft's own, and are not read."""
    return name.startswith(_SHARED)


def read_weights(
    source: TensorSource, config: DSparkConfig, parallel: Parallel = SINGLE
) -> DSparkWeights:
    """Take every tensor from the source. Errors are the source's (CheckpointError).

    Ranks share the layers' heads and MLP width; everything small each has whole.
    """
    width = config.layers.hidden_size
    captured = len(config.target_layer_ids) * config.target_hidden_size
    return DSparkWeights(
        fc=source.take("fc.weight", (width, captured)),
        hidden_norm=source.take("hidden_norm.weight", (width,), wide=True),
        layers=tuple(
            read_layer(source, f"layers.{layer}", config.layers, parallel)
            for layer in range(config.layers.num_layers)
        ),
        norm=source.take("norm.weight", (width,), wide=True),
        markov=_markov(source, config),
        confidence=_confidence(source, config),
    )


def _markov(source: TensorSource, config: DSparkConfig) -> MarkovWeights:
    vocab, rank, width = config.layers.vocab_size, config.markov_rank, config.layers.hidden_size
    proj = bias = None
    match config.markov_kind:
        case MarkovKind.VANILLA:
            pass
        case MarkovKind.GATED:
            proj = source.take("markov_head.gate_proj.weight", (rank, width + rank))
            bias = source.take("markov_head.gate_proj.bias", (rank,))
        case MarkovKind.RNN:
            proj = source.take("markov_head.joint_proj.weight", (3 * rank, 2 * rank + width))
            bias = source.take("markov_head.joint_proj.bias", (3 * rank,))
    return MarkovWeights(
        kind=config.markov_kind,
        w1=source.take("markov_head.markov_w1.weight", (vocab, rank)),
        w2=source.take("markov_head.markov_w2.weight", (vocab, rank)),
        proj=proj,
        bias=bias,
    )


def _confidence(source: TensorSource, config: DSparkConfig) -> ConfidenceWeights | None:
    if config.confidence is None:
        return None
    extra = config.markov_rank if config.confidence.with_markov else 0
    width = config.layers.hidden_size + extra
    return ConfidenceWeights(
        proj=source.take("confidence_head.proj.weight", (1, width), wide=True),
        bias=source.take("confidence_head.proj.bias", (1,), wide=True),
    )
