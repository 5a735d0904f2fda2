"""The state a Kimi Linear request leaves behind, as buffer specs, and the components' names.

Both recurrent rows put heads first, because tensor parallelism splits heads: a rank's share is one
stretch of bytes, where rows of ``[columns, q | k | v]`` would scatter it over 3 x 3 pieces.
"""

from __future__ import annotations

from sluice.errors import ConfigError
from sluice.layout.component import Coverage, Kind, Owner
from sluice.models.kimi_linear.config import KimiLinearConfig, LayerKind
from sluice.pools.base import BufferSpec
from sluice.pools.block_scale import MXFP8, stored

MLA = "target.mla"
CONV = "kda.conv"
RECURRENT = "kda.recurrent"
LENGTH = "kda.length"

UNSETTLED = -1  # a length while the layers' states are being written, one after the other

_RECURRENT_DTYPE = "float32"  # thousands of updates accumulate in it
_LENGTH_DTYPE = "int64"
_KV_DTYPES = ("float32", "bfloat16", "float16", MXFP8)
_BLOCK_SCALED_CONV_DTYPE = "float32"  # a narrower one would save 3 % of a slot
_HEAD_AXIS = 0


def target_state(config: KimiLinearConfig, kv_dtype: str, ranks: int = 1) -> tuple[BufferSpec, ...]:
    """Latent pages of the attention layers, then the recurrent layers' slots, in wire order.

    Of ``ranks`` that share the model, each keeps its heads' recurrent state and all latents.

    - ``target.mla``: a row a token, ``[latent | shared key part]``; every rank has all of it.
      With ``mxfp8`` its scales follow as ``target.mla.scale``, and nothing else is block-scaled.
    - ``kda.conv``: ``[heads, columns, q | k | v]``, the newest raw projections, oldest column first,
      zeros before the first token.
    - ``kda.recurrent``: float32 ``[heads, keys, values]``.
    - ``kda.length``: how many tokens conv and recurrent have taken in. It travels with them, and
      every forward compares it with where its segment starts.

    Raises ConfigError for a row dtype this code can't compute with, GeometryError for latents that
    aren't whole mxfp8 blocks.
    """
    if kv_dtype not in _KV_DTYPES:
        raise ConfigError(
            f"kv_dtype {kv_dtype!r} is not supported by Kimi Linear; known: {list(_KV_DTYPES)}",
            stage="pools",
        )
    kda_layers, shape = config.layers_of(LayerKind.KDA), config.kda.of_rank(ranks)
    heads = shape.num_heads
    latents = BufferSpec(
        name=MLA,
        owner=Owner.TARGET,
        kind=Kind.KV,
        coverage=Coverage.HISTORY,
        tokens_per_row=1,
        window_tokens=0,
        layer_ids=config.layers_of(LayerKind.MLA),
        dtype=kv_dtype,
        row_shape=(config.mla.row_dim,),
        dealt=True,
    )
    conv_dtype = _BLOCK_SCALED_CONV_DTYPE if kv_dtype == MXFP8 else kv_dtype
    specs = (
        *stored(latents, (config.mla.latent_dim, config.mla.shared_dim)),
        _slot(
            CONV,
            Kind.KDA_CONV,
            kda_layers,
            conv_dtype,
            (heads, shape.columns, shape.head_channels),
            shards=ranks,
        ),
        _slot(
            RECURRENT,
            Kind.KDA_RECURRENT,
            kda_layers,
            _RECURRENT_DTYPE,
            (heads, shape.key_dim, shape.value_dim),
            shards=ranks,
        ),
        _slot(LENGTH, Kind.STATE_LENGTH, kda_layers[:1], _LENGTH_DTYPE, (1,), shard_axis=None),
    )
    return tuple(spec for spec in specs if spec.layer_ids)


def _slot(
    name: str,
    kind: Kind,
    layers: tuple[int, ...],
    dtype: str,
    row_shape: tuple[int, ...],
    shard_axis: int | None = _HEAD_AXIS,
    shards: int = 1,
) -> BufferSpec:
    return BufferSpec(
        name=name,
        owner=Owner.TARGET,
        kind=kind,
        coverage=Coverage.LAST,
        tokens_per_row=1,
        window_tokens=0,
        layer_ids=layers,
        dtype=dtype,
        row_shape=row_shape,
        shard_axis=shard_axis,
        shards=shards,
    )
