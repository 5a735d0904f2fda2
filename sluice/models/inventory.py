"""From a ``config.json`` alone to the state a request of that model keeps: no weights, no memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.errors import ConfigError, UnsupportedModel
from sluice.models.config_fields import ConfigFields
from sluice.models.deepseek_v4 import config as deepseek_v4_config
from sluice.models.deepseek_v4 import state as deepseek_v4_state
from sluice.models.dspark import config as dspark_config
from sluice.models.dspark import state as dspark_state
from sluice.models.kimi_linear import config as kimi_linear_config
from sluice.models.kimi_linear import state as kimi_linear_state
from sluice.models.kimi_linear.config import LayerKind
from sluice.models.llama import config as llama_config
from sluice.models.llama import state as llama_state
from sluice.pools.base import BufferSpec

_DTYPE_KEYS = ("torch_dtype", "dtype")  # transformers' older and newer name


@dataclass(frozen=True)
class StateNeeds:
    """What a configuration says about state. ``draft`` is empty without a draft layer of its own.

    The specs are those that the family's ``state_needs`` gives the pools; ``window_tokens``, ``ratios`` and
    ``config_digest`` are the loaded model's (`ModelInfo`).
    """

    num_layers: int
    max_model_tokens: int
    window_tokens: int
    ratios: tuple[int, ...]
    config_digest: str
    target: tuple[BufferSpec, ...]
    draft: tuple[BufferSpec, ...]


@dataclass(frozen=True)
class DraftNeeds:
    """State of a draft with a checkpoint of its own, and how many tokens it drafts a step."""

    steps: int
    state: tuple[BufferSpec, ...]


@dataclass(frozen=True)
class ModelConfigFile:
    """A parsed, not yet interpreted ``config.json``. ``dtype``: the type it names, or None."""

    architecture: str
    dtype: str | None
    fields: ConfigFields

    def state_needs(self, kv_dtype: str) -> StateNeeds:
        """Raises ``UnsupportedModel`` or ``ConfigError``, from the family's own parser."""
        family = INVENTORIES.get(self.architecture)
        if family is None:
            raise UnsupportedModel(
                f"architecture {self.architecture!r} is not supported",
                stage="load",
                remedy=f"supported: {', '.join(sorted(INVENTORIES))}",
            )
        return family(self.fields, kv_dtype)


def read_config_file(path: Path) -> ModelConfigFile:
    """Raises ``ConfigError`` for a file that isn't a model's ``config.json``."""
    fields = ConfigFields(_read_object(path))
    names = fields.strings("architectures")
    if len(names) != 1:
        raise ConfigError(
            f"config key 'architectures' is {list(names)}, expected one name", stage="load"
        )
    dtype = next((fields.get(key) for key in _DTYPE_KEYS if fields.has(key)), None)
    return ModelConfigFile(names[0], dtype if isinstance(dtype, str) else None, fields)


def read_draft_needs(
    path: Path, target: StateNeeds, kv_dtype: str, steps: int | None
) -> DraftNeeds:
    """What the ``config.json`` of a DSPARK draft says about state.

    ``steps``: how many tokens a step it shall draft; None for as many as it does.

    Raises ``UnsupportedModel`` for another kind of draft, ``ConfigError`` for a broken file, steps that
    aren't the draft's, or a target with another number of layers (only loading compares all of it).
    """
    config = dspark_config.parse_config(_read_object(path))
    if steps is not None:
        dspark_config.check_steps(config, steps)
    if config.num_target_layers != target.num_layers:
        raise ConfigError(
            f"the draft's num_target_layers is {config.num_target_layers}, its target has "
            f"{target.num_layers}",
            stage="load",
            remedy="use a draft that was trained on this target",
        )
    return DraftNeeds(config.block_size, dspark_state.draft_state(config, kv_dtype))


def _read_object(path: Path) -> dict[str, object]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: {error}", stage="load") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}, not an object", stage="load")
    return raw


def _deepseek_v4(fields: ConfigFields, kv_dtype: str) -> StateNeeds:
    config = deepseek_v4_config.parse_config(fields)
    drafts = config.num_nextn_layers > 0
    return StateNeeds(
        num_layers=config.num_layers,
        max_model_tokens=config.max_position_tokens,
        window_tokens=config.window_tokens,
        ratios=tuple(config.ratio(layer) for layer in range(config.num_layers)),
        config_digest=_digest(config),
        target=deepseek_v4_state.target_state(config, kv_dtype),
        draft=deepseek_v4_state.draft_state(config, kv_dtype) if drafts else (),
    )


def _kimi_linear(fields: ConfigFields, kv_dtype: str) -> StateNeeds:
    config = kimi_linear_config.parse_config(fields)
    return StateNeeds(
        num_layers=config.num_layers,
        max_model_tokens=config.max_position_tokens,
        window_tokens=0,
        ratios=tuple(int(kind is LayerKind.MLA) for kind in config.layer_kinds),
        config_digest=_digest(config),
        target=kimi_linear_state.target_state(config, kv_dtype),
        draft=(),
    )


def _llama(fields: ConfigFields, kv_dtype: str) -> StateNeeds:
    config = llama_config.parse_config(fields)
    return StateNeeds(
        num_layers=config.num_layers,
        max_model_tokens=config.max_position_tokens,
        window_tokens=0,
        ratios=(1,) * config.num_layers,
        config_digest=_digest(config),
        target=llama_state.target_state(config, kv_dtype),
        draft=(),
    )


def _digest(config: object) -> str:
    """As the loaders digest a configuration."""
    return hashlib.blake2b(repr(config).encode(), digest_size=16).hexdigest()


# One for every architecture that ``registry.LOADERS`` loads.
INVENTORIES: Mapping[str, Callable[[ConfigFields, str], StateNeeds]] = {
    deepseek_v4_config.ARCHITECTURE: _deepseek_v4,
    kimi_linear_config.ARCHITECTURE: _kimi_linear,
    llama_config.LLAMA: _llama,
    llama_config.QWEN3: _llama,
}
