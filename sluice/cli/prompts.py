"""Prompts for `sluice ab`: readable ones, and lengths around every boundary of the state layouts."""

from __future__ import annotations

from pathlib import Path

from sluice.errors import ConfigError
from sluice.text.tokenizer import ModelTokenizer

# Compression blocks of 4 and 128, windows and pages of up to 256 tokens: each and its neighbours.
BOUNDARY_TOKENS = (1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 127, 128, 129, 130, 255, 256, 257, 513)
_TEXTS = (
    "Once upon a time",
    "It is a truth universally acknowledged, that",
    "In the beginning",
    "She looked out of the window and saw",
    "The letter said: dear sister,",
    "k7=apple; k3=river; k9=stone; k3=",
)
_FILLER = (
    "The carriage stood before the door, and the whole family came out to see them go. "
    "Mr. Ward, who had said little at breakfast, now said that the road would be dry. "
)


def default_prompts(tokenizer: ModelTokenizer) -> tuple[tuple[int, ...], ...]:
    """Token ids of the built-in prompts, short texts first, then one of each boundary length."""
    filler: tuple[int, ...] = ()
    repeats = 1
    while len(filler) < max(BOUNDARY_TOKENS):
        filler = tokenizer.encode(_FILLER * repeats)
        repeats *= 2
    texts = tuple(tokenizer.encode(text) for text in _TEXTS)
    return texts + tuple(filler[:length] for length in BOUNDARY_TOKENS)


def prompts_from_file(path: Path, tokenizer: ModelTokenizer) -> tuple[tuple[int, ...], ...]:
    """One prompt a line; empty lines are left out. Raises `ConfigError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}", stage="start") from error
    prompts = tuple(tokenizer.encode(line) for line in lines if line.strip())
    if not prompts:
        raise ConfigError(f"{path} has no prompts", stage="start", remedy="write one a line")
    return prompts
