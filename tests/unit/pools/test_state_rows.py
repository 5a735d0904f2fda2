"""Rows through the one pair of functions that models use, plain and block-scaled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sluice.config import PoolConfig, PoolMode
from sluice.layout.component import Coverage, Kind, Owner
from sluice.layout.span import span
from sluice.pools.backup import back_up, restore
from sluice.pools.base import BufferSpec, RequestTables
from sluice.pools.block_scale import MXFP8, dequantise, quantise, stored
from sluice.pools.memory import Memory, build_memory
from sluice.pools.state_rows import BlockScaledRows, PlainRows, state_rows
from sluice.transfer.digest import digest_rows
from sluice.types import RequestId

KV = "target.kv"
LENGTH = 11
PAIR = (KV, f"{KV}.scale")
SPEC = BufferSpec(KV, Owner.TARGET, Kind.KV, Coverage.HISTORY, 1, 0, (0, 1), MXFP8, (2, 64))
OTHER = replace(SPEC, name="target.other", dtype="float32", row_shape=(5,))
POOL = PoolConfig(page_tokens=4, num_pages=12, num_slots=2, fill="nan")


def memory_of(spec: BufferSpec = SPEC, pool: PoolConfig = POOL) -> Memory:
    return build_memory((*stored(spec), OTHER), pool, 1)


def opened(memory: Memory, name: str = "r") -> RequestTables:
    tables = memory.open(RequestId(name), 16)
    memory.extend(tables, LENGTH)
    tables.kv_len = LENGTH
    return tables


def rows_of(tables: RequestTables) -> torch.Tensor:
    return torch.tensor([tables.pages[p // 4] * 4 + p % 4 for p in range(LENGTH)])


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def test_block_scaled_rows_read_what_the_format_makes_of_them() -> None:
    memory = memory_of()
    rows, x = rows_of(opened(memory)), noise(LENGTH, 2, 64)
    for layer in (0, 1):
        layer_rows = state_rows(memory, KV, layer)
        assert isinstance(layer_rows, BlockScaledRows)
        layer_rows.write(rows, x + layer)
    index = rows.flip(0).view(1, LENGTH)
    for layer in (0, 1):
        found = state_rows(memory, KV, layer).read(index, torch.float32)
        assert torch.equal(found, dequantise(*quantise(x + layer), torch.float32).flip(0)[None])


def test_plain_rows_only_change_type() -> None:
    memory = memory_of(replace(SPEC, dtype="bfloat16"))
    rows, x = rows_of(opened(memory)), noise(LENGTH, 2, 64)
    layer_rows = state_rows(memory, KV, 1)
    assert isinstance(layer_rows, PlainRows)
    layer_rows.write(rows, x)
    assert torch.equal(layer_rows.read(rows, torch.float32), x.bfloat16().float())


def test_the_component_after_a_plain_one_is_not_taken_for_its_scales() -> None:
    assert isinstance(state_rows(memory_of(), "target.other", 0), PlainRows)


@pytest.mark.parametrize("mode", list(PoolMode))
def test_a_windows_scales_are_found_whatever_the_mode_calls_them(mode: PoolMode) -> None:
    spec = replace(
        SPEC, name="target.swa", kind=Kind.SWA, coverage=Coverage.WINDOW, window_tokens=4
    )
    memory = memory_of(spec, replace(POOL, mode=mode))
    assert isinstance(state_rows(memory, memory.window_name(spec.name), 0), BlockScaledRows)


def test_unwritten_rows_show() -> None:
    memory = memory_of()
    rows = rows_of(opened(memory))
    read = state_rows(memory, KV, 0).read(rows, torch.float32)
    assert bool(read.isnan().all())


@pytest.mark.parametrize("name", PAIR)
def test_a_flipped_byte_changes_the_digest_of_its_component_alone(name: str) -> None:
    memory = memory_of()
    tables = opened(memory)
    rows = rows_of(tables)
    for layer in (0, 1):
        state_rows(memory, KV, layer).write(rows, noise(LENGTH, 2, 64))

    def digests() -> dict[str, bytes]:
        parts = [memory.component(part) for part in PAIR]
        return {c.name: digest_rows(memory, c, span(c, tables, LENGTH)) for c in parts}

    before = digests()
    buffer = memory.buffer(name, 1).view(torch.uint8)
    for row in (rows[0], rows[-1]):
        buffer[row, 1, -1] ^= 1
        assert {part for part in PAIR if digests()[part] != before[part]} == {name}
        buffer[row, 1, -1] ^= 1
    assert digests() == before


def test_values_and_scales_are_backed_up_and_restored() -> None:
    memory = memory_of()
    tables, x = opened(memory), noise(LENGTH, 2, 64)
    layers = [state_rows(memory, KV, layer) for layer in (0, 1)]
    for rows in layers:
        rows.write(rows_of(tables), x)
    memory.buffer("target.other", 0)[rows_of(tables)] = 1.0
    memory.buffer("target.other", 1)[rows_of(tables)] = 1.0
    backup = back_up(memory, tables)
    memory.close(tables)
    opened(memory, "in between")
    tables = opened(memory, "back")
    tables.kv_len = 0
    restore(memory, backup, tables)
    for rows in layers:
        found = rows.read(rows_of(tables), torch.float32)
        assert torch.equal(found, dequantise(*quantise(x), torch.float32))


@pytest.mark.optional(reason="needs a CUDA device")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_keeps_the_same_bytes_and_digests() -> None:
    memories = [memory_of(pool=replace(POOL, device=device)) for device in ("cpu", "cuda")]
    found = []
    for memory in memories:
        tables, device = opened(memory), memory.arena().device
        rows, x = rows_of(tables).to(device), noise(LENGTH, 2, 64).to(device)
        for layer in (0, 1):
            state_rows(memory, KV, layer).write(rows, x * 1e-3**layer)
        read = state_rows(memory, KV, 1).read(rows, torch.float32).cpu()
        parts = [memory.component(part) for part in PAIR]
        found.append((read, [digest_rows(memory, c, span(c, tables, LENGTH)) for c in parts]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
