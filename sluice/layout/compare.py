"""Field by field comparison of two layouts: yields every difference, judged by ``rules``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from sluice.layout.causes import follow
from sluice.layout.component import SCALE_KINDS, Component, Coverage, Entry, Owner
from sluice.layout.layout import Layout, Parallelism
from sluice.layout.outcome import Mismatch, Severity
from sluice.layout.rules import RESHARDED, FieldRule, render, rows_rule, rule_for, setting
from sluice.types import Role

_ALLOW = setting(Role.DECODE, "allow_missing_draft")


def compare(prefill: Layout, decode: Layout, *, allow_missing_draft: bool) -> Iterator[Mismatch]:
    """Every difference, in the order of the layout's fields."""
    if (prefill.role, decode.role) != (Role.PREFILL.value, Role.DECODE.value):
        yield rule_for(Layout, "role").mismatch("role", prefill.role, decode.role)
    yield from _fields("", prefill, decode, only=("wire_version",))
    yield from _fields("model.", prefill.model, decode.model)
    yield from _fields("geometry.", prefill.geometry, decode.geometry)
    yield from _parallelism(prefill.parallelism, decode.parallelism)
    yield from _spec(prefill, decode, allow_missing_draft)
    yield from _components(prefill, decode, allow_missing_draft)


def _parallelism(prefill: Parallelism, decode: Parallelism) -> Iterator[Mismatch]:
    """Widths convert when one divides the other, contexts when prefill doesn't split its own."""
    small, large = sorted((max(1, prefill.tensor), max(1, decode.tensor)))
    for mismatch in _fields("parallelism.", prefill, decode):
        if mismatch.path == "parallelism.tensor" and large % small:
            yield replace(
                mismatch,
                severity=Severity.FATAL,
                explanation="neither tensor-parallel width divides the other",
                remedy=f"choose {setting(Role.PREFILL, 'tp')} and {setting(Role.DECODE, 'tp')} so that one does",
            )
        elif mismatch.path == "parallelism.context" and prefill.context != 1:
            yield replace(
                mismatch,
                severity=Severity.FATAL,
                explanation="a prefill pod that deals its history to ranks pairs only with its equal",
                remedy=f"set {setting(Role.PREFILL, 'dcp')}=1",
            )
        else:
            yield mismatch


def drafts(layout: Layout) -> bool:
    return layout.spec.algorithm != "none"


def _fields(
    prefix: str, prefill: object, decode: object, only: Sequence[str] = ()
) -> Iterator[Mismatch]:
    for name in only or [f.name for f in fields(prefill)]:  # type: ignore[arg-type]
        ours, theirs = getattr(prefill, name), getattr(decode, name)
        if ours != theirs:
            yield rule_for(type(prefill), name).mismatch(prefix + name, ours, theirs)


def _spec(prefill: Layout, decode: Layout, allow_missing_draft: bool) -> Iterator[Mismatch]:
    found = list(_fields("spec.", prefill.spec, decode.spec))
    if drafts(prefill) == drafts(decode):
        yield from found
        return
    severity = Severity.CONVERTIBLE if allow_missing_draft else Severity.FATAL
    for mismatch in found:
        if mismatch.path == "spec.algorithm":
            yield _one_sided(mismatch, prefill, decode, allow_missing_draft)
        else:
            yield follow(replace(mismatch, severity=severity), "spec.algorithm")


def _one_sided(mismatch: Mismatch, prefill: Layout, decode: Layout, allowed: bool) -> Mismatch:
    """A draft on one pod only: refused, unless somebody said in so many words that it is meant."""
    has, lacks = Role.DECODE, Role.PREFILL
    if not drafts(decode):
        has, lacks = lacks, has
    steps = max(prefill.spec.steps, decode.spec.steps)
    if not allowed:
        return replace(
            mismatch,
            severity=Severity.FATAL,
            explanation=f"only the {has.value} pod has a draft, so its state can't be handed over",
            remedy=(
                f"to draft on both pods set {setting(lacks, 'spec_steps')}={steps}, to draft on "
                f"neither {setting(has, 'spec_steps')}=0; to run as it is, {_ALLOW}=true"
            ),
        )
    outcome = (
        "agreed without the draft's components: decode marks the draft window invalid, and accepts "
        "fewer drafts until it has refilled"
        if drafts(decode)
        else "agreed without the draft's components: decode doesn't speculate"
    )
    return replace(mismatch, severity=Severity.CONVERTIBLE, explanation=outcome, remedy="")


def _components(prefill: Layout, decode: Layout, allow_missing_draft: bool) -> Iterator[Mismatch]:
    ours = {component.name: component for component in prefill.components}
    theirs = {component.name: component for component in decode.components}
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if name in ours and name in theirs:
            widening = decode.parallelism.context if prefill.parallelism.context == 1 else 1
            yield from _component(ours[name], theirs[name], widening)
        else:
            yield _missing(
                name, prefill, decode, ours.get(name), theirs.get(name), allow_missing_draft
            )
    order_p = tuple(name for name in ours if name in theirs)
    order_d = tuple(name for name in theirs if name in ours)
    if order_p != order_d:
        yield FieldRule(
            Severity.FATAL,
            "the same components in another order; sending and digests follow the order",
            "run the same Sluice release on both pods",
        ).mismatch("components", order_p, order_d)


def _missing(
    name: str,
    prefill: Layout,
    decode: Layout,
    ours: Component | None,
    theirs: Component | None,
    allow_missing_draft: bool,
) -> Mismatch:
    component = ours or theirs
    assert component is not None
    rule = rule_for(Component, "name")
    mismatch = rule.mismatch(f"components[{name}]", _present(ours), _present(theirs))
    one_sided = drafts(prefill) != drafts(decode)
    if component.owner is Owner.DRAFT and one_sided:
        severity = Severity.CONVERTIBLE if allow_missing_draft else Severity.FATAL
        return follow(replace(mismatch, severity=severity), "spec.algorithm")
    one_mode = prefill.geometry.pool_mode == decode.geometry.pool_mode
    if component.coverage is Coverage.WINDOW and not one_mode:
        return follow(mismatch, "geometry.pool_mode")
    one_format = prefill.geometry.kv_dtype == decode.geometry.kv_dtype
    if component.kind in SCALE_KINDS and not one_format:
        return follow(mismatch, "geometry.kv_dtype")
    return mismatch


def _present(component: Component | None) -> str:
    if component is None:
        return "absent"
    count = len(component.entries)
    return f"{component.kind.value}, {count} {'entry' if count == 1 else 'entries'}"


def _component(prefill: Component, decode: Component, widening: int) -> Iterator[Mismatch]:
    path = f"components[{prefill.name}]."
    for field in fields(Component):
        ours, theirs = getattr(prefill, field.name), getattr(decode, field.name)
        if ours == theirs:
            continue
        if field.name == "entries":
            yield from _entries(path, prefill.entries, decode.entries)
        elif field.name == "rows_per_item":
            yield rows_rule(prefill, decode, widening).mismatch(path + field.name, ours, theirs)
        else:
            yield rule_for(Component, field.name).mismatch(path + field.name, ours, theirs)


_SPLIT_FIELDS = frozenset({"row_shape", "row_bytes", "shards"})


@dataclass(frozen=True)
class _Difference:
    field: str
    prefill: object
    decode: object


def _entries(
    path: str, prefill: tuple[Entry, ...], decode: tuple[Entry, ...]
) -> Iterator[Mismatch]:
    """Entries pair by position; where their numbers differ, by layer. Equal differences share one
    mismatch.
    """
    pairs = list(zip(prefill, decode, strict=False))
    if len(prefill) != len(decode):
        yield rule_for(Entry, "layer_id").mismatch(
            path + "entries", _describe(prefill), _describe(decode)
        )
        by_layer = {entry.layer_id: entry for entry in decode}
        pairs = [(e, by_layer[e.layer_id]) for e in prefill if e.layer_id in by_layer]
    where: dict[_Difference, list[int]] = {}
    for index, (ours, theirs) in enumerate(pairs):
        parts = _is_resharded(ours, theirs)
        for field in fields(Entry):
            if parts and field.name in _SPLIT_FIELDS:
                continue
            values = getattr(ours, field.name), getattr(theirs, field.name)
            if values[0] != values[1]:
                where.setdefault(_Difference(field.name, *values), []).append(index)
    for difference, indices in where.items():
        label = "*" if len(indices) == len(pairs) > 1 else ",".join(map(str, indices))
        yield rule_for(Entry, difference.field).mismatch(
            f"{path}entries[{label}].{difference.field}", difference.prefill, difference.decode
        )
    if any(_is_resharded(ours, theirs) for ours, theirs in pairs):
        yield RESHARDED.mismatch(path + "entries[*].shards", _parts(prefill[0]), _parts(decode[0]))


def _is_resharded(ours: Entry, theirs: Entry) -> bool:
    """The same whole row in another number of parts: split along its first axis, so that a part is one
    stretch of bytes.
    """
    return (
        ours.shards != theirs.shards
        and bool(ours.row_shape and theirs.row_shape)
        and (
            _whole_shape(ours) == _whole_shape(theirs)
            and ours.row_bytes * ours.shards == theirs.row_bytes * theirs.shards
            and ours.shard_axis == theirs.shard_axis == 0
        )
    )


def _whole_shape(entry: Entry) -> tuple[int, ...]:
    return (entry.row_shape[0] * entry.shards, *entry.row_shape[1:])


def _parts(entry: Entry) -> str:
    return (
        f"{entry.shards} parts of {render(entry.row_shape)}" if entry.shards > 1 else "whole rows"
    )


def _describe(entries: tuple[Entry, ...]) -> str:
    count = len(entries)
    layers = render(tuple(entry.layer_id for entry in entries))
    return f"{count} {'entry' if count == 1 else 'entries'}, layers {layers}"
