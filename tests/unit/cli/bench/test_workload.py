"""What a load sends: lengths, shared prefixes, texts, and traces."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from sluice.cli.bench.workload import Item, Lengths, from_texts, from_trace, synthetic
from sluice.errors import ConfigError

_WORDS = range(10, 60)


@pytest.mark.parametrize(
    ("text", "low", "high"), [("7", 7, 7), ("3-9", 3, 9), ("100~10", 60, 140), ("2~9", 1, 38)]
)
def test_lengths_stay_within_what_they_say(text: str, low: int, high: int) -> None:
    lengths = Lengths.parse(text)
    drawn = [lengths.draw(random.Random(i)) for i in range(2000)]
    assert low <= min(drawn) <= max(drawn) <= high
    assert len(set(drawn)) == 1 if low == high else {low, high} <= set(drawn) or "~" in text


def test_a_normal_length_has_its_mean() -> None:
    rng = random.Random(1)
    lengths = Lengths.parse("100~10")
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(100, abs=1)


@pytest.mark.parametrize("text", ["0", "5-3", "x", "-3", "10~-1", "1-2-3", ""])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"no length|invalid literal|too many"):
        Lengths.parse(text)


def test_synthetic_prompts_share_only_what_they_are_told_to() -> None:
    def draw(seed: int) -> list[Item]:
        return list(
            synthetic(20, Lengths(30, 50), Lengths(5, 9), _WORDS, shared_prefix=16, seed=seed)
        )

    items = draw(3)
    assert len({item.prompt[:16] for item in items}) == 1
    assert len({item.prompt[16:24] for item in items}) == 20
    assert all(30 <= len(item.prompt) <= 50 and 5 <= item.max_tokens <= 9 for item in items)
    assert set().union(*(item.prompt for item in items)) <= set(_WORDS)
    assert items == draw(3) != draw(4)
    (short,) = synthetic(1, Lengths(4, 4), Lengths(1, 1), _WORDS, shared_prefix=16)
    assert len(short.prompt) == 4


def test_texts_go_round(tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_text("one\n\ntwo\n")
    items = from_texts(file, 5, Lengths(3, 3))
    assert [item.prompt for item in items] == ["one", "two", "one", "two", "one"]
    file.write_text("\n")
    with pytest.raises(ConfigError, match="no prompts"):
        from_texts(file, 1, Lengths(3, 3))


def _trace(file: Path, *rows: tuple[float, int, int, list[int]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    file.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return file


def test_a_trace_shares_blocks_as_its_ids_do(tmp_path: Path) -> None:
    file = _trace(
        tmp_path / "trace.jsonl",
        (27500, 1100, 8, [0, 1, 2]),
        (27000, 1100, 500, [0, 1, 3]),
        (30000, 600, 2, [4]),  # the published traces have rows with too few ids
    )
    first, second, third = from_trace(file, _WORDS)
    assert [item.at_s for item in (first, second, third)] == [0.0, 0.5, 3.0]
    assert [len(item.prompt) for item in (first, second, third)] == [1100, 1100, 600]
    assert [item.max_tokens for item in (first, second, third)] == [500, 8, 2]
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:] != second.prompt[1024:]
    assert first.prompt[:512] != first.prompt[512:1024]
    assert third.prompt[:512] != first.prompt[:512]


def test_a_trace_can_be_shrunk_hurried_and_cut(tmp_path: Path) -> None:
    file = _trace(
        tmp_path / "t", (0, 1024, 100, [0, 1]), (4000, 1024, 1, [0, 2]), (9000, 1024, 1, [3, 4])
    )
    first, second = from_trace(file, _WORDS, limit=2, speed=2.0, scale=1 / 16)
    assert (len(first.prompt), first.max_tokens, second.max_tokens) == (64, 6, 1)
    assert second.at_s == 2.0
    assert first.prompt[:32] == second.prompt[:32]
    assert first.prompt[32:] != second.prompt[32:]


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"timestamp": 1}', '{"timestamp": 0, "input_length": "x"}']
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = _trace(tmp_path / "t", (0, 4, 1, []))
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=r"t, line 2: "):
        from_trace(file, _WORDS)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read"):
        from_trace(tmp_path / "none", _WORDS)
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="no requests"):
        from_trace(tmp_path / "empty", _WORDS)
