"""The state a Llama or Qwen3 request leaves behind: keys and values of every token, in full pages."""

from __future__ import annotations

from sluice.errors import ConfigError
from sluice.layout.component import Coverage, Kind, Owner
from sluice.models.llama.config import LlamaConfig
from sluice.pools.base import BufferSpec
from sluice.pools.block_scale import MXFP8, stored

KV = "target.kv"
_KV_DTYPES = ("float32", "bfloat16", "float16", MXFP8)
_HEAD_AXIS = 0


def target_state(config: LlamaConfig, kv_dtype: str, ranks: int = 1) -> tuple[BufferSpec, ...]:
    """One component with a row a token: ``[kv_heads, 2, head_dim]``, key then value of each head; with
    ``mxfp8`` its scales follow as a second one.

    ``config`` is the whole model's; of ``ranks`` that share it, each keeps its own heads. Heads come first
    because of that: a rank's share of a row is then one stretch of bytes. Raises ConfigError for a row
    dtype this code can't compute with, GeometryError for heads that aren't whole mxfp8 blocks.
    """
    if kv_dtype not in _KV_DTYPES:
        raise ConfigError(
            f"kv_dtype {kv_dtype!r} is not supported by {config.architecture}; "
            f"known: {list(_KV_DTYPES)}",
            stage="pools",
        )
    local = config.of_rank(ranks)
    return stored(
        BufferSpec(
            name=KV,
            owner=Owner.TARGET,
            kind=Kind.KV,
            coverage=Coverage.HISTORY,
            tokens_per_row=1,
            window_tokens=0,
            layer_ids=tuple(range(config.num_layers)),
            dtype=kv_dtype,
            row_shape=(local.num_kv_heads, 2, config.head_dim),
            shard_axis=_HEAD_AXIS,
            shards=config.num_kv_heads // local.num_kv_heads,
        )
    )
