"""One rule for every field of a layout: what a difference means, why, and what to change where.

The gate compares by this table and the fingerprint leaves out what it calls harmless. A field
without a rule is an error (``rule_for`` raises), so a new field can't slip through the gate
unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from sluice.layout.component import Component, Coverage, Space
from sluice.layout.outcome import Mismatch, Severity
from sluice.types import Role


@dataclass(frozen=True)
class FieldRule:
    """``remedy`` may use ``{prefill}`` and ``{decode}`` for the two values."""

    severity: Severity
    why: str
    remedy: str = ""

    def mismatch(self, path: str, prefill: object, decode: object) -> Mismatch:
        return Mismatch(
            path=path,
            prefill_value=render(prefill),
            decode_value=render(decode),
            severity=self.severity,
            explanation=self.why,
            remedy=self.remedy.format(prefill=render(prefill), decode=render(decode)),
        )


def render(value: object) -> str:
    """A field's value as people read it."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return " ".join(render(item) for item in value) if value else "none"
    if value is None or value == "":
        return "none"
    return str(value)


def setting(role: Role, name: str) -> str:
    """Environment name of a pod's setting: ``page_tokens`` -> ``SLUICE_DECODE_PAGE_TOKENS``."""
    return f"SLUICE_{role.value}_{name}".upper()


def _equal(name: str) -> str:
    prefill, decode = setting(Role.PREFILL, name), setting(Role.DECODE, name)
    return f"set {decode}={{prefill}} on the decode pod, or {prefill}={{decode}} on the prefill pod"


def _same(name: str) -> str:
    return f"give {setting(Role.PREFILL, name)} and {setting(Role.DECODE, name)} the same value"


_SAME_MODEL = (
    f"point {setting(Role.PREFILL, 'model_dir')} and {setting(Role.DECODE, 'model_dir')} "
    "at the same checkpoint"
)
_SAME_RELEASE = "run the same Sluice release on both pods"
_SAME_DRAFT = "load the same draft (the same checkpoint folder) on both pods"


def _fatal(why: str, remedy: str) -> FieldRule:
    return FieldRule(Severity.FATAL, why, remedy)


def _convertible(why: str) -> FieldRule:
    return FieldRule(Severity.CONVERTIBLE, why)


def _harmless(why: str) -> FieldRule:
    return FieldRule(Severity.HARMLESS, why)


RULES: Mapping[str, FieldRule] = {
    "Layout.role": _harmless("a pod is used in another role than the one it started with"),
    "Layout.wire_version": _fatal("the pods speak different protocol versions", _SAME_RELEASE),
    "ModelIdentity.architecture": _fatal(
        "the pods serve different model architectures", _SAME_MODEL
    ),
    "ModelIdentity.config_digest": _fatal(
        "config.json differs, so the same bytes mean something else", _SAME_MODEL
    ),
    "ModelIdentity.weights_digest": _fatal(
        "the weights differ: state of one model means nothing to another", _SAME_MODEL
    ),
    "ModelIdentity.tokenizer_digest": _fatal(
        "the tokenizers differ, so token ids name different text", _SAME_MODEL
    ),
    "Geometry.page_tokens": _fatal(
        "pages of different length: this version pairs equal pages only",
        _equal("page_tokens"),
    ),
    "Geometry.window_tokens": _fatal("the sliding windows differ in length", _SAME_MODEL),
    "Geometry.compression_ratios": _fatal("layers compress their history differently", _SAME_MODEL),
    "Geometry.pool_mode": _fatal(
        "one pod keeps windows in pages, the other in per-request rings",
        _equal("pool_mode"),
    ),
    "Geometry.ring_rows": _convertible(
        "window rings of different stride: each pod turns positions into rows with its own"
    ),
    "Geometry.kv_dtype": _fatal("state is stored in different number formats", _equal("kv_dtype")),
    "Geometry.byte_layout": _fatal("rows have a different byte order inside", _SAME_RELEASE),
    "Parallelism.tensor": _convertible(
        "different tensor-parallel widths: each decode rank is written by the prefill ranks that hold its part"
    ),
    "Parallelism.context": _convertible(
        "different context-parallel widths: history is dealt to decode's ranks token by token"
    ),
    "Parallelism.rank": _harmless("ranks number the pods of one role; they are paired by width"),
    "SpecIdentity.algorithm": _fatal("the pods draft with different algorithms", _SAME_DRAFT),
    "SpecIdentity.steps": _convertible(
        "prefill drafts nothing, it only fills the draft window: decode's number counts"
    ),
    "SpecIdentity.draft_tokens": _convertible(
        "only decode verifies: decode's number counts, and its rings must be long enough for it"
    ),
    "SpecIdentity.draft_digest": _fatal(
        "the drafts' weights differ, so decode's draft would read another draft's state",
        _SAME_DRAFT,
    ),
    "SpecIdentity.draft_ratios": _fatal("draft layers compress differently", _SAME_DRAFT),
    "Component.name": _fatal("the pods have different components", _SAME_RELEASE),
    "Component.owner": _fatal("target and draft state must not be mixed", _SAME_RELEASE),
    "Component.kind": _fatal("the same name stands for different state", _SAME_RELEASE),
    "Component.space": _fatal("the component is addressed differently", _same("pool_mode")),
    "Component.coverage": _fatal("the pods would send different rows", _SAME_RELEASE),
    "Component.tokens_per_row": _fatal("a row stands for different numbers of tokens", _SAME_MODEL),
    "Component.rows_per_item": _fatal(
        "pages hold different numbers of rows",
        _same("page_tokens"),
    ),
    "Component.window_tokens": _fatal("the pods would send different rows", _SAME_MODEL),
    "Component.num_items": _harmless("capacities may differ: each pod allocates from its own"),
    "Entry.layer_id": _fatal("the entries belong to different layers", _SAME_MODEL),
    "Entry.dtype": _fatal(
        "rows are stored in different number formats",
        _same("kv_dtype"),
    ),
    "Entry.row_shape": _fatal("rows have different shapes", _SAME_MODEL),
    "Entry.row_bytes": _fatal(
        "rows differ in size: writing one over the other would hit a neighbour's row",
        _same("kv_dtype"),
    ),
    "Entry.shard_axis": _fatal("rows are split over ranks along different axes", _SAME_RELEASE),
    "Entry.shards": _fatal("the parts of a row don't make up the same whole row", _SAME_MODEL),
    "Component.interleave": _convertible(
        "rows are dealt to a different number of ranks: each gets those that it owns"
    ),
}

_RING_ROWS = _convertible(
    "rings of different stride: rows are addressed by position modulo each pod's own stride"
)


def rule_for(owner: type, field: str) -> FieldRule:
    """The rule of one field. Raises ``KeyError`` for a field nobody decided about."""
    return RULES[f"{owner.__name__}.{field}"]


def is_harmless(owner: type, field: str) -> bool:
    rule = RULES.get(f"{owner.__name__}.{field}")
    return rule is not None and rule.severity is Severity.HARMLESS


def is_ring(component: Component) -> bool:
    """Whether rows are reused modulo ``rows_per_item``, so that two pods' strides may differ.

    True of rings, and of tails kept in window pages: a tail uses only ``rows_per_item`` rows of
    each page.
    """
    return (
        component.space in (Space.RING_ROW, Space.STATE_ROW)
        or component.coverage is Coverage.OVERLAP_TAIL
    )


RESHARDED = _convertible(
    "rows are split over more ranks on one pod: each part goes where it belongs"
)
_DEALT_PAGES = _convertible(
    "a page of all ranks together: each has as many rows of it as prefill's pages"
)


def rows_rule(prefill: Component, decode: Component, widening: int = 1) -> FieldRule:
    """The rule for ``rows_per_item``: a stride may differ, a page only by decode's context-parallel width
    over prefill's (``widening``).
    """
    if is_ring(prefill) and is_ring(decode):
        return _RING_ROWS
    if decode.rows_per_item == prefill.rows_per_item * widening:
        return _DEALT_PAGES
    return rule_for(Component, "rows_per_item")
