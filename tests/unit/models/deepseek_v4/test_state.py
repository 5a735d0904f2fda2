"""The state specs: order, row shapes and dtypes are what the wire and the pools rely on."""

from __future__ import annotations

import dataclasses

import pytest

from sluice.errors import ConfigError
from sluice.layout.component import Coverage, Owner
from sluice.models.config_fields import ConfigFields
from sluice.models.deepseek_v4.config import LayerKind, parse_config
from sluice.models.deepseek_v4.state import draft_state, target_state
from tests.parity.deepseek_v4_oracle import TINY

CONFIG = parse_config(ConfigFields(TINY))


def test_target_state_in_wire_order() -> None:
    found = [(s.name, s.layer_ids, s.row_shape, s.dtype) for s in target_state(CONFIG, "bfloat16")]
    assert found == [
        ("target.c4", (1, 3), (32,), "bfloat16"),
        ("target.c4_indexer", (1, 3), (16,), "bfloat16"),
        ("target.c128", (2,), (32,), "bfloat16"),
        ("target.swa", (0, 1, 2, 3, 4), (32,), "bfloat16"),
        ("target.c4_tail", (1, 3), (128,), "float32"),
        ("target.c4_indexer_tail", (1, 3), (64,), "float32"),
        ("target.c128_tail", (2,), (64,), "float32"),
    ]


def test_draft_state_is_a_window_and_one_hidden_row() -> None:
    window, hidden = draft_state(CONFIG, "float32")
    assert (window.owner, window.coverage, window.layer_ids) == (Owner.DRAFT, Coverage.WINDOW, (5,))
    assert window.window_tokens == CONFIG.window_tokens
    assert (hidden.coverage, hidden.row_shape) == (Coverage.LAST, (4, 96))


def test_kinds_without_layers_have_no_state() -> None:
    kinds = (LayerKind.WINDOW, LayerKind.HCA)
    config = dataclasses.replace(CONFIG, layer_kinds=kinds, hash_layers=(False, False))
    names = [spec.name for spec in target_state(config, "float32")]
    assert names == ["target.c128", "target.swa", "target.c128_tail"]


def test_unknown_row_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'float8_e4m3fn'.*bfloat16"):
        target_state(CONFIG, "float8_e4m3fn")
