"""The prompts of `sluice ab`."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.cli.prompts import BOUNDARY_TOKENS, default_prompts, prompts_from_file
from sluice.errors import ConfigError
from tests.integration.router_harness import TOKENIZER


def test_every_boundary_length_is_there() -> None:
    lengths = [len(prompt) for prompt in default_prompts(TOKENIZER)]
    assert tuple(lengths[-len(BOUNDARY_TOKENS) :]) == BOUNDARY_TOKENS
    assert min(lengths) == 1


def test_a_file_has_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  \ntwo é\n", encoding="utf-8")
    expected = (TOKENIZER.encode("one"), TOKENIZER.encode("two é"))
    assert prompts_from_file(path, TOKENIZER) == expected


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read .*missing\.txt"):
        prompts_from_file(tmp_path / "missing.txt", TOKENIZER)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ConfigError, match="no prompts"):
        prompts_from_file(tmp_path / "empty.txt", TOKENIZER)
