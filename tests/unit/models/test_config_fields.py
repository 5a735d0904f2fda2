"""Every complaint about a raw config names the key, the value and what was expected."""

from __future__ import annotations

import pytest

from sluice.errors import ConfigError
from sluice.models.config_fields import ConfigFields

FIELDS = ConfigFields(
    {"n": 3, "x": 0.5, "flag": True, "none": None, "list": [1, 2], "inner": {"bad": "x"}}
)


def test_reads_typed_values() -> None:
    assert FIELDS.integer("n") == 3
    assert FIELDS.number("n") == 3.0
    assert FIELDS.number("x") == 0.5
    assert FIELDS.integer("none", 7) == 7
    assert FIELDS.boolean("flag") is True
    assert FIELDS.boolean("none", False) is False
    assert FIELDS.optional_integer("none") is None
    assert FIELDS.integer_or_list("list") == (1, 2)
    assert FIELDS.integer_or_list("n") == (3,)
    assert FIELDS.integer_or_list("none") == ()
    assert FIELDS.section("none") is None
    assert not FIELDS.has("none")


def test_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="'absent' is missing"):
        FIELDS.integer("absent")


def test_wrong_type_names_key_and_value() -> None:
    with pytest.raises(ConfigError, match=r"'x' is 0.5, expected an integer"):
        FIELDS.integer("x")
    with pytest.raises(ConfigError, match=r"'flag' is True, expected an integer"):
        FIELDS.integer("flag")
    with pytest.raises(ConfigError, match=r"'n' is 3, expected true or false"):
        FIELDS.boolean("n")
    with pytest.raises(ConfigError, match=r"'n' is 3, expected at least 4"):
        FIELDS.integer("n", at_least=4)
    with pytest.raises(ConfigError, match="a list of strings"):
        FIELDS.strings("list")
    with pytest.raises(ConfigError, match="an object"):
        FIELDS.section("n")


def test_nested_key_shows_its_path() -> None:
    inner = FIELDS.section("inner")
    assert inner is not None
    with pytest.raises(ConfigError, match=r"'inner\.bad' is 'x'"):
        inner.integer("bad")
