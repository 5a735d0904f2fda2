"""The state a DSPARK draft keeps of a request: its layers' keys and values of every committed token."""

from __future__ import annotations

from sluice.errors import ConfigError
from sluice.layout.component import Coverage, Kind, Owner
from sluice.models.dspark.config import DSparkConfig
from sluice.pools.base import BufferSpec
from sluice.pools.block_scale import MXFP8, stored

DRAFT_KV = "draft.kv"
_KV_DTYPES = ("float32", "bfloat16", "float16", MXFP8)
_HEAD_AXIS = 0


def draft_layer_ids(config: DSparkConfig) -> tuple[int, ...]:
    """The draft's layers, numbered after the target's."""
    first = config.num_target_layers
    return tuple(range(first, first + config.layers.num_layers))


def draft_state(config: DSparkConfig, kv_dtype: str, ranks: int = 1) -> tuple[BufferSpec, ...]:
    """One component, a row a token: ``[kv_heads, 2, head_dim]``, key then value of each head; with
    ``mxfp8`` its scales follow as a second one.

    Row p comes from the target's hidden states at position p alone, so a prompt's rows are final as
    soon as its chunk has run, and nothing else of the draft needs to travel: a block starts from the
    newest token. Raises ConfigError for a row dtype this code can't compute with, GeometryError for
    heads that aren't whole mxfp8 blocks.
    """
    if kv_dtype not in _KV_DTYPES:
        raise ConfigError(
            f"kv_dtype {kv_dtype!r} is not supported by a DSPARK draft; known: {list(_KV_DTYPES)}",
            stage="pools",
        )
    local = config.layers.of_rank(ranks)
    return stored(
        BufferSpec(
            name=DRAFT_KV,
            owner=Owner.DRAFT,
            kind=Kind.KV,
            coverage=Coverage.HISTORY,
            tokens_per_row=1,
            window_tokens=0,
            layer_ids=draft_layer_ids(config),
            dtype=kv_dtype,
            row_shape=(local.num_kv_heads, 2, local.head_dim),
            shard_axis=_HEAD_AXIS,
            shards=config.layers.num_kv_heads // local.num_kv_heads,
        )
    )
