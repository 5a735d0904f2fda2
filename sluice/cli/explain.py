"""``sluice explain``: what a request of a model keeps and moves, from its ``config.json`` alone.

The figures come from the model's own state specs, the pools' components and ``layout.explain``: what
pods of this model would declare, before there are any pods or weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.cli.places import model_folder
from sluice.config import PoolConfig, PoolMode, SpecConfig
from sluice.errors import ConfigError
from sluice.layout.columns import columns, layers, size
from sluice.layout.component import Component
from sluice.layout.explain import (
    bytes_per_token,
    cost_in_words,
    coverage_in_words,
    most_request_bytes,
    moved_by,
    row_in_words,
)

if TYPE_CHECKING:
    from sluice.models.inventory import StateNeeds
    from sluice.pools.base import BufferSpec

_LENGTHS = (1024, 8192, 131072)


@dataclass(frozen=True)
class Inventory:
    """A model's state as pods with these settings would declare it.

    ``own_dtype``: ``pool.kv_dtype`` is the type that config.json names. ``lengths``: of prompts, in
    tokens, to show the moved bytes of.
    """

    architecture: str
    num_layers: int
    max_model_tokens: int
    pool: PoolConfig
    own_dtype: bool
    spec: SpecConfig
    drafts: bool
    components: tuple[Component, ...]
    lengths: tuple[int, ...]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register ``explain``."""
    about = "what a request of a model keeps and moves, from config.json alone"
    parser = commands.add_parser("explain", help=about, description=about)
    parser.add_argument("model", help="a config.json, a model folder, or a name under models/")
    parser.add_argument(
        "--tokens",
        type=_positive,
        nargs="+",
        metavar="L",
        help="prompt lengths; 1024, 8192 and 131072 when left out, as far as the model takes them",
    )
    parser.add_argument(
        "--mode", default="paged", choices=[mode.value for mode in PoolMode], help="pool mode"
    )
    parser.add_argument(
        "--spec-steps",
        type=int,
        metavar="S",
        help=f"drafted tokens a step; 0 = off; {SpecConfig.steps}, or a DSPARK draft's block, when "
        "left out",
    )
    parser.add_argument(
        "--draft", metavar="DRAFT", help="a DSPARK draft's config.json or folder, if there is one"
    )
    parser.add_argument(
        "--kv-dtype",
        metavar="TYPE",
        help="number type of keys and values; config.json's by default",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0. Raises ``ConfigError``, ``UnsupportedModel`` or ``GeometryError``."""
    inventory = read_inventory(
        _config_path(args.model),
        mode=PoolMode(args.mode),
        draft=None if args.draft is None else _config_path(args.draft),
        spec_steps=args.spec_steps,
        kv_dtype=args.kv_dtype,
        lengths=args.tokens,
    )
    print(_as_json(inventory) if args.json else explain_inventory(inventory), end="")
    return 0


def read_inventory(
    path: Path,
    *,
    mode: PoolMode = PoolMode.PAGED,
    draft: Path | None = None,
    spec_steps: int | None = None,
    kv_dtype: str | None = None,
    lengths: Sequence[int] | None = None,
) -> Inventory:
    """The inventory of the model that ``path``, a ``config.json``, describes.

    ``draft`` is the one of a DSPARK draft. Raises ``ConfigError`` or a child of it: an unknown
    architecture, a broken file, a draft of another model, a number type, number of steps or prompt
    length the model can't have.
    """
    # Model code imports torch, which takes seconds: only for this command.
    from sluice.models.inventory import read_config_file
    from sluice.pools.specs import components_of

    file = read_config_file(path)
    pool = PoolConfig(mode=mode, kv_dtype=kv_dtype or file.dtype or PoolConfig.kv_dtype)
    needs = file.state_needs(pool.kv_dtype)
    spec, draft_state = _speculation(needs, draft, spec_steps, pool.kv_dtype)
    return Inventory(
        architecture=file.architecture,
        num_layers=needs.num_layers,
        max_model_tokens=needs.max_model_tokens,
        pool=pool,
        own_dtype=kv_dtype is None and file.dtype is not None,
        spec=spec,
        drafts=bool(draft_state),
        components=components_of((*needs.target, *draft_state), pool, spec.verify_tokens),
        lengths=_lengths(lengths, needs),
    )


def _speculation(
    needs: StateNeeds, draft: Path | None, steps: int | None, kv_dtype: str
) -> tuple[SpecConfig, tuple[BufferSpec, ...]]:
    """How many tokens are drafted a step, and the state of what drafts them; none with 0 steps."""
    from sluice.models.inventory import DraftNeeds, read_draft_needs

    if steps is not None and steps < 0:
        raise ConfigError(f"--spec-steps is {steps}, must be 0 (off) or more", stage="start")
    if draft is not None and needs.draft:
        raise ConfigError("the model has a draft layer of its own", remedy="leave --draft out")
    if steps == 0:
        return SpecConfig(steps=0), ()
    drafter = DraftNeeds(SpecConfig.steps if steps is None else steps, needs.draft)
    if draft is not None:
        drafter = read_draft_needs(draft, needs, kv_dtype, steps)
    return SpecConfig(steps=drafter.steps), drafter.state


def explain_inventory(inventory: Inventory) -> str:
    """The model, its components as a table, what a request costs, and what prompts move."""
    parts = [_settings(inventory), _table(inventory.components), _costs(inventory.components)]
    return "\n\n".join([*parts, _prompts(inventory)]) + "\n"


def _settings(inventory: Inventory) -> str:
    pool, spec = inventory.pool, inventory.spec
    source = " as in config.json" if inventory.own_dtype else ""
    facts = [
        (
            "model",
            f"{inventory.architecture}, {inventory.num_layers} layers, "
            f"up to {inventory.max_model_tokens} tokens",
        ),
        (
            "state",
            f"{pool.mode.value}, pages of {pool.page_tokens} tokens, {pool.kv_dtype}{source}",
        ),
        (
            "draft",
            f"{spec.steps} steps, {spec.verify_tokens} tokens verified a step"
            if inventory.drafts
            else "none",
        ),
    ]
    return "\n".join(columns(facts, indent=""))


def _table(components: Sequence[Component]) -> str:
    header = ("component", "owner", "kept in", "layers", "row of a layer", "costs", "holds")
    rows = [
        (
            component.name,
            component.owner.value,
            component.space.value,
            layers([entry.layer_id for entry in component.entries]),
            row_in_words(component),
            cost_in_words(component),
            coverage_in_words(component),
        )
        for component in components
    ]
    return "\n".join(columns([header, *rows], right=frozenset({5}), indent=""))


def _costs(components: Sequence[Component]) -> str:
    token, request = _token_bytes(components), _request_bytes(components)
    besides = f"at most {size(request)}" if request else "nothing"
    return f"a request keeps {token:,.10g} bytes a token, and {besides} besides"


def _prompts(inventory: Inventory) -> str:
    header = ("component", *(f"{length} tokens" for length in inventory.lengths))
    rows = [
        (component.name, *(size(moved_by(component, n).num_bytes) for n in inventory.lengths))
        for component in inventory.components
    ]
    total = ("total", *(size(_moved_bytes(inventory, n)) for n in inventory.lengths))
    right = frozenset(range(1, len(header)))
    lines = columns([header, *rows, total], right=right)
    return "\n".join(["what a prompt moves from prefill to decode:", *lines])


def _as_json(inventory: Inventory) -> str:
    document = {
        "architecture": inventory.architecture,
        "num_layers": inventory.num_layers,
        "max_model_tokens": inventory.max_model_tokens,
        "pool_mode": inventory.pool.mode.value,
        "page_tokens": inventory.pool.page_tokens,
        "kv_dtype": inventory.pool.kv_dtype,
        "spec_steps": inventory.spec.steps if inventory.drafts else 0,
        "bytes_per_token": _token_bytes(inventory.components),
        "most_request_bytes": _request_bytes(inventory.components),
        "components": [_component_as_json(component) for component in inventory.components],
        "prompts": [_prompt_as_json(inventory, length) for length in inventory.lengths],
    }
    return json.dumps(document, indent=2) + "\n"


def _component_as_json(component: Component) -> dict[str, object]:
    return {
        "name": component.name,
        "owner": component.owner.value,
        "kind": component.kind.value,
        "space": component.space.value,
        "coverage": component.coverage.value,
        "holds": coverage_in_words(component),
        "tokens_per_row": component.tokens_per_row,
        "row_bytes": component.bytes_per_row,
        "bytes_per_token": bytes_per_token(component),
        "most_request_bytes": most_request_bytes(component),
        "layers": [
            {
                "layer": entry.layer_id,
                "dtype": entry.dtype,
                "row_shape": list(entry.row_shape),
                "row_bytes": entry.row_bytes,
            }
            for entry in component.entries
        ],
    }


def _prompt_as_json(inventory: Inventory, length: int) -> dict[str, object]:
    parts = [moved_by(component, length) for component in inventory.components]
    return {
        "tokens": length,
        "bytes": _moved_bytes(inventory, length),
        "components": [
            {"name": part.name, "rows": part.rows, "bytes": part.num_bytes} for part in parts
        ],
    }


def _token_bytes(components: Sequence[Component]) -> float:
    return sum(bytes_per_token(component) for component in components)


def _request_bytes(components: Sequence[Component]) -> int:
    return sum(most_request_bytes(component) for component in components)


def _moved_bytes(inventory: Inventory, length: int) -> int:
    return sum(moved_by(component, length).num_bytes for component in inventory.components)


def _lengths(chosen: Sequence[int] | None, needs: StateNeeds) -> tuple[int, ...]:
    most = needs.max_model_tokens
    if chosen is None:
        return tuple(length for length in _LENGTHS if length <= most) or (most,)
    for length in chosen:
        if length > most:
            raise ConfigError(
                f"a prompt of {length} tokens is longer than the model's {most}",
                stage="start",
                remedy=f"give --tokens up to {most}",
            )
    return tuple(chosen)


def _config_path(model: str) -> Path:
    path = Path(model)
    return path if path.is_file() else model_folder(model) / "config.json"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of tokens")
    return int(text)
