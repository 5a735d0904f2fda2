"""Fixtures of the end-to-end tests: the shipped model."""

from __future__ import annotations

from pathlib import Path

import pytest

TINY_DSV4 = Path(__file__).parents[2] / "models" / "tiny-dsv4"


@pytest.fixture(scope="session")
def model_dir() -> Path:
    assert (TINY_DSV4 / "model.safetensors").is_file(), "the shipped model is missing"
    return TINY_DSV4
