"""Typed, named access to a raw ``config.json``, so that every complaint names its key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from sluice.errors import ConfigError


class _Required:
    """Marks a field without a default."""


_REQUIRED: Final = _Required()


class ConfigFields:
    """One JSON object of a model's configuration. Every reader's ConfigError names its key."""

    def __init__(self, raw: Mapping[str, object], path: str = "") -> None:
        self._raw = raw
        self._path = path

    def names(self) -> Iterable[str]:
        return self._raw.keys()

    def has(self, key: str) -> bool:
        """Present and not null."""
        return self._raw.get(key) is not None

    def get(self, key: str, default: object = None) -> object:
        """The raw value; the default when absent or null."""
        value = self._raw.get(key)
        return default if value is None else value

    def integer(
        self, key: str, default: int | _Required = _REQUIRED, *, at_least: int | None = None
    ) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "an integer")
        if at_least is not None and value < at_least:
            raise self._wrong(key, value, f"at least {at_least}")
        return value

    def number(self, key: str, default: float | _Required = _REQUIRED) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        return float(value)

    def boolean(self, key: str, default: bool | _Required = _REQUIRED) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if self.has(key) else None

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._value(key, _REQUIRED)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._wrong(key, value, "a list of integers")
        return tuple(value)

    def integer_or_list(self, key: str) -> tuple[int, ...]:
        """One integer, a list of them, or nothing."""
        if not self.has(key):
            return ()
        value = self._raw[key]
        return self.integers(key) if isinstance(value, list) else (self.integer(key),)

    def strings(
        self, key: str, default: tuple[str, ...] | _Required = _REQUIRED
    ) -> tuple[str, ...]:
        value = self._value(key, default)
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of strings")
        return tuple(value)

    def section(self, key: str) -> ConfigFields | None:
        """A nested object, or None when absent."""
        if not self.has(key):
            return None
        value = self._raw[key]
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return ConfigFields(value, f"{self._path}{key}.")

    def _value(self, key: str, default: object) -> object:
        value = self.get(key, default)
        if isinstance(value, _Required):
            raise ConfigError(
                f"config key {self._path + key!r} is missing",
                stage="load",
                remedy="compare config.json with the published one",
            )
        return value

    def _wrong(self, key: str, value: object, expected: str) -> ConfigError:
        return ConfigError(
            f"config key {self._path + key!r} is {value!r}, expected {expected}", stage="load"
        )
