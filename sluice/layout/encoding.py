"""A layout as text, both ways (what ``sluice layout show --save`` writes), and its fingerprint.

The format is JSON with sorted keys: ``{"format": "sluice-layout", "version": 1, "layout": {...}}``.
It is read strictly: an unknown, missing or ill-typed field is an error that names it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from sluice.errors import ConfigError
from sluice.layout.layout import Layout
from sluice.layout.rules import is_harmless

FORMAT = "sluice-layout"
VERSION = 1


def encode(layout: Layout, *, indent: int | None = None) -> str:
    """Canonical text: equal layouts, equal text. ``indent`` only adds white space for people."""
    document = {"format": FORMAT, "version": VERSION, "layout": _plain(layout)}
    return _dump(document, indent)


def decode(text: str) -> Layout:
    """Inverse of ``encode``. Raises ``ConfigError`` naming the field that doesn't fit."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise _unreadable(f"not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _unreadable(f'no "format": "{FORMAT}"')
    if document.get("version") != VERSION:
        raise _unreadable(f"version {document.get('version')!r}, this release reads {VERSION}")
    layout = _typed(Layout, document.get("layout"), "layout")
    assert isinstance(layout, Layout)
    return layout


def fingerprint(layout: Layout) -> str:
    """sha256 hex of what the gate compares: everything but the harmless fields (capacities, role,
    rank).
    """
    return hashlib.sha256(_dump(_plain(layout, compared_only=True), None).encode()).hexdigest()


def _dump(value: object, indent: int | None) -> str:
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(value, sort_keys=True, separators=separators, indent=indent)


def _plain(value: object, compared_only: bool = False) -> object:
    if is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name), compared_only)
            for field in fields(value)
            if not (compared_only and is_harmless(type(value), field.name))
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item, compared_only) for item in value]
    return value


def _typed(kind: Any, value: object, path: str) -> object:
    """``value`` as the annotated type ``kind``, checked all the way down."""
    if get_origin(kind) is UnionType:
        options = get_args(kind)
        if value is None and type(None) in options:
            return None
        (kind,) = (option for option in options if option is not type(None))
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise _unreadable(f"{path} is {value!r}, not a list")
        return tuple(
            _typed(get_args(kind)[0], item, f"{path}[{i}]") for i, item in enumerate(value)
        )
    if is_dataclass(kind):
        return _typed_fields(kind, value, path)
    if issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            known = ", ".join(str(member.value) for member in kind)
            raise _unreadable(f"{path} is {value!r}, not one of {known}") from None
    if type(value) is not kind:  # isinstance would let a bool pass for an int
        raise _unreadable(f"{path} is {value!r}, not of type {kind.__name__}")
    return value


def _typed_fields(kind: Any, value: object, path: str) -> object:
    if not isinstance(value, dict):
        raise _unreadable(f"{path} is {value!r}, not an object")
    hints = get_type_hints(kind)
    required = {f.name for f in fields(kind) if f.default is MISSING}
    if unknown := sorted(value.keys() - hints.keys()):
        raise _unreadable(f"{path} has unknown fields: {', '.join(unknown)}")
    if missing := sorted(required - value.keys()):
        raise _unreadable(f"{path} lacks: {', '.join(missing)}")
    return kind(
        **{name: _typed(hints[name], item, f"{path}.{name}") for name, item in value.items()}
    )


def _unreadable(what: str) -> ConfigError:
    return ConfigError(
        f"not a readable layout file: {what}",
        stage="layout",
        remedy="write one with: sluice layout show POD --save FILE",
    )
