"""The state a DeepSeek-V4 request leaves behind, as buffer specs, and the components' base names."""

from __future__ import annotations

from sluice.errors import ConfigError
from sluice.layout.component import Coverage, Kind, Owner
from sluice.models.deepseek_v4.config import DeepseekV4Config, LayerKind
from sluice.pools.base import BufferSpec

C4 = "target.c4"
C4_INDEXER = "target.c4_indexer"
C128 = "target.c128"
WINDOW = "target.swa"
C4_TAIL = "target.c4_tail"
C4_INDEXER_TAIL = "target.c4_indexer_tail"
C128_TAIL = "target.c128_tail"
DRAFT_WINDOW = "draft.swa"
DRAFT_HIDDEN = "draft.hidden"

# Pending compressor rows stay in float32: pooling sums up to 128 of them.
_TAIL_DTYPE = "float32"
_KV_DTYPES = ("float32", "bfloat16", "float16")


def target_state(config: DeepseekV4Config, kv_dtype: str) -> tuple[BufferSpec, ...]:
    """The target's state in wire order: compressed history, window, compressor tails.

    Tail rows are ``[kv | gate]`` of one token, gates without position bias. Kinds of layers the model
    does not have are left out. Raises ConfigError for a row dtype this code can't compute with.
    """
    _check_dtype(kv_dtype)
    every = tuple(range(config.num_layers))
    csa, hca = config.layers_of(LayerKind.CSA), config.layers_of(LayerKind.HCA)
    width, index_width = config.head_dim, config.index_dim
    specs = (
        _history(C4, Kind.C4, config.csa_ratio, csa, kv_dtype, width),
        _history(C4_INDEXER, Kind.C4_INDEXER, config.csa_ratio, csa, kv_dtype, index_width),
        _history(C128, Kind.C128, config.hca_ratio, hca, kv_dtype, width),
        _window(WINDOW, Owner.TARGET, config, every, kv_dtype),
        _tail(C4_TAIL, Kind.C4_TAIL, Coverage.OVERLAP_TAIL, config.csa_ratio, csa, 4 * width),
        _tail(
            C4_INDEXER_TAIL,
            Kind.C4_INDEXER_TAIL,
            Coverage.OVERLAP_TAIL,
            config.csa_ratio,
            csa,
            4 * index_width,
        ),
        _tail(C128_TAIL, Kind.C128_TAIL, Coverage.OPEN_BLOCK, config.hca_ratio, hca, 2 * width),
    )
    return tuple(spec for spec in specs if spec.layer_ids)


def draft_state(config: DeepseekV4Config, kv_dtype: str) -> tuple[BufferSpec, ...]:
    """The NextN layer's window, and its own streams at the last committed position."""
    _check_dtype(kv_dtype)
    layer = (config.num_layers,)  # numbered after the target's layers
    hidden = BufferSpec(
        name=DRAFT_HIDDEN,
        owner=Owner.DRAFT,
        kind=Kind.HIDDEN,
        coverage=Coverage.LAST,
        tokens_per_row=1,
        window_tokens=0,
        layer_ids=layer,
        dtype=kv_dtype,
        row_shape=(config.hyper.num_streams, config.hidden_size),
    )
    return _window(DRAFT_WINDOW, Owner.DRAFT, config, layer, kv_dtype), hidden


def _history(
    name: str, kind: Kind, ratio: int, layers: tuple[int, ...], dtype: str, width: int
) -> BufferSpec:
    return BufferSpec(
        name=name,
        owner=Owner.TARGET,
        kind=kind,
        coverage=Coverage.HISTORY,
        tokens_per_row=ratio,
        window_tokens=0,
        layer_ids=layers,
        dtype=dtype,
        row_shape=(width,),
    )


def _window(
    name: str, owner: Owner, config: DeepseekV4Config, layers: tuple[int, ...], dtype: str
) -> BufferSpec:
    return BufferSpec(
        name=name,
        owner=owner,
        kind=Kind.SWA,
        coverage=Coverage.WINDOW,
        tokens_per_row=1,
        window_tokens=config.window_tokens,
        layer_ids=layers,
        dtype=dtype,
        row_shape=(config.head_dim,),
    )


def _tail(
    name: str, kind: Kind, coverage: Coverage, ratio: int, layers: tuple[int, ...], width: int
) -> BufferSpec:
    return BufferSpec(
        name=name,
        owner=Owner.TARGET,
        kind=kind,
        coverage=coverage,
        tokens_per_row=1,
        window_tokens=ratio,
        layer_ids=layers,
        dtype=_TAIL_DTYPE,
        row_shape=(width,),
    )


def _check_dtype(kv_dtype: str) -> None:
    if kv_dtype not in _KV_DTYPES:
        raise ConfigError(
            f"kv_dtype {kv_dtype!r} is not supported by DeepSeek-V4; known: {list(_KV_DTYPES)}",
            stage="pools",
        )
