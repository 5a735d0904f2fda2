"""Parts of tensors: equal, of each block, shared by neighbours, and refused where they aren't whole."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from sluice.errors import ConfigError
from sluice.models.quantised import dequantise, dequantise_part
from sluice.parallel.cut import Cut, Cuts, cut, part_of, share, shared_part_of


@dataclass(frozen=True)
class Rank:
    """A place among ranks; it calls nobody."""

    rank: int
    size: int


def parts(axis: int, size: int, **kwargs: tuple[int, ...]) -> list[Cuts]:
    return [part_of(Rank(rank, size), axis, **kwargs) for rank in range(size)]  # type: ignore[arg-type]


def test_parts_make_up_the_whole() -> None:
    x = torch.arange(24).view(4, 6)
    assert torch.equal(torch.cat([cut(x, one) for one in parts(1, 3)], dim=1), x)
    assert torch.equal(torch.cat([cut(x, one) for one in parts(0, 4)]), x)


def test_conv_resharded_as_one_block() -> None:
    """A part of query | key | value is a part of each; one slice of all three mixes them."""
    q, k, v = torch.arange(4), torch.arange(4) + 10, torch.arange(8) + 20
    whole = torch.cat((q, k, v))
    first, second = (cut(whole, one) for one in parts(0, 2, blocks=(4, 4, 8)))
    assert first.tolist() == [0, 1, 10, 11, 20, 21, 22, 23]
    assert second.tolist() == [2, 3, 12, 13, 24, 25, 26, 27]
    assert cut(whole, parts(0, 2)[0]).tolist() != first.tolist()


def test_neighbours_share_where_there_are_more_ranks_than_parts() -> None:
    x = torch.arange(2)
    held = [cut(x, shared_part_of(Rank(r, 4), 0, 2)).tolist() for r in range(4)]  # type: ignore[arg-type]
    assert held == [[0], [0], [1], [1]]


@pytest.mark.parametrize(("count", "ways"), [(6, 4), (3, 2)])
def test_what_does_not_divide_is_refused_by_name(count: int, ways: int) -> None:
    with pytest.raises(ConfigError, match=f"num_heads {count} can't be shared equally by {ways}"):
        share("num_heads", count, ways)


CUTS = [(Cut(0, 1, 2),), (Cut(1, 2, 4),), (Cut(0, 0, 2, (192, 64)),), (Cut(0, 1, 2), Cut(1, 1, 2))]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_a_part_of_fp8_blocks_equals_the_whole_ones(cuts: Cuts) -> None:
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn(256, 320, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=generator) + 0.5
    whole = dequantise(stored, scale, torch.float32)
    part = dequantise_part(stored, scale, torch.float32, cuts, torch.device("cpu"))
    assert torch.equal(part, cut(whole, cuts))


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_a_part_of_packed_fp4_equals_the_whole_ones(cuts: Cuts) -> None:
    generator = torch.Generator().manual_seed(0)
    stored = torch.randint(0, 256, (256, 160), generator=generator, dtype=torch.uint8)
    scale = torch.rand(256, 10, generator=generator) + 0.5
    whole = dequantise(stored, scale, torch.float32)
    part = dequantise_part(stored, scale, torch.float32, cuts, torch.device("cpu"))
    assert torch.equal(part, cut(whole, cuts))
