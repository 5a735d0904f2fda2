"""Digests: equal for equal rows wherever they lie, different for everything else."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from sluice.layout.component import Component, Coverage, Entry, Kind, Owner, Space
from sluice.layout.span import Run
from sluice.transfer.digest import DIGEST_BYTES, _on_device, _on_host, digest_rows

_COMPONENT = Component(
    name="target.swa",
    owner=Owner.TARGET,
    kind=Kind.SWA,
    space=Space.WINDOW_PAGE,
    coverage=Coverage.WINDOW,
    tokens_per_row=1,
    rows_per_item=4,
    window_tokens=8,
    num_items=6,
    entries=(Entry(0, "bfloat16", (3,), 6), Entry(2, "float32", (2, 2), 16)),
)
_DTYPES = {0: torch.bfloat16, 2: torch.float32}


class _Memory:
    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.buffers = {
            entry.layer_id: torch.randn(24, *entry.row_shape, generator=generator).to(
                _DTYPES[entry.layer_id]
            )
            for entry in _COMPONENT.entries
        }

    def buffer(self, component: str, layer_id: int) -> Tensor:
        assert component == _COMPONENT.name
        return self.buffers[layer_id]


def _moved(source: _Memory, from_rows: list[int], to_rows: list[int]) -> _Memory:
    target = _Memory(seed=99)
    for layer_id, buffer in target.buffers.items():
        buffer[to_rows] = source.buffers[layer_id][from_rows]
    return target


_SOURCE_ROWS = [4, 5, 6, 9]
_TARGET_ROWS = [20, 21, 7, 8]
_SOURCE_RUNS = (Run(4, 3), Run(9, 1))
_TARGET_RUNS = (Run(20, 2), Run(7, 2))


def test_equal_on_both_sides_whatever_the_row_numbers() -> None:
    source = _Memory(seed=1)
    target = _moved(source, _SOURCE_ROWS, _TARGET_ROWS)
    digest = digest_rows(source, _COMPONENT, _SOURCE_RUNS)
    assert len(digest) == DIGEST_BYTES
    assert digest == digest_rows(target, _COMPONENT, _TARGET_RUNS)


@pytest.mark.parametrize("layer_id", [0, 2])
@pytest.mark.parametrize("row", _TARGET_ROWS)
def test_one_changed_bit_shows(layer_id: int, row: int) -> None:
    source = _Memory(seed=1)
    target = _moved(source, _SOURCE_ROWS, _TARGET_ROWS)
    target.buffers[layer_id][row].view(torch.uint8).view(-1)[-1] ^= 1
    expected = digest_rows(source, _COMPONENT, _SOURCE_RUNS)
    assert digest_rows(target, _COMPONENT, _TARGET_RUNS) != expected


def test_rows_outside_the_span_do_not_matter() -> None:
    source = _Memory(seed=1)
    before = digest_rows(source, _COMPONENT, _SOURCE_RUNS)
    source.buffers[0][7] = float("nan")
    assert digest_rows(source, _COMPONENT, _SOURCE_RUNS) == before


def test_swapped_rows_show() -> None:
    source = _Memory(seed=1)
    swapped = _moved(source, [5, 4, 6, 9], _TARGET_ROWS)
    expected = digest_rows(source, _COMPONENT, _SOURCE_RUNS)
    assert digest_rows(swapped, _COMPONENT, _TARGET_RUNS) != expected


def test_name_and_count_belong_to_the_digest() -> None:
    source = _Memory(seed=1)
    empty = digest_rows(source, _COMPONENT, ())
    renamed = dataclasses.replace(_COMPONENT, name="draft.swa")
    assert digest_rows(source, _COMPONENT, _SOURCE_RUNS) != empty

    class _Anything(_Memory):
        def buffer(self, component: str, layer_id: int) -> Tensor:
            return self.buffers[layer_id]

    assert digest_rows(_Anything(seed=1), renamed, ()) != empty


@pytest.mark.parametrize("runs", [(), _SOURCE_RUNS, (Run(23, 1), Run(0, 2))])
def test_device_rows_are_gathered_in_the_same_order(runs: tuple[Run, ...]) -> None:
    """The device path works on any tensor; here it runs on the host."""
    for buffer in _Memory(seed=1).buffers.values():
        assert b"".join(_on_device(buffer, runs)) == b"".join(_on_host(buffer, runs))
