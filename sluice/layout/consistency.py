"""Rules one pod's layout must keep by itself: draft beside target, long enough rings, whole rows.

Checked when a pod builds its pools (``check_layout``) and again by the gate for both pods
(``broken_rules``), since two pods can be equal and equally wrong. A broken draft rule shows the
target's geometry and the draft's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sluice.errors import GeometryError
from sluice.layout.component import SCALE_KINDS, Component, Coverage, Kind, Owner, Space
from sluice.layout.layout import Layout
from sluice.layout.outcome import Mismatch, Severity
from sluice.layout.rules import is_ring, render
from sluice.types import Role

_SPACES = {
    "paged": {Coverage.WINDOW: Space.WINDOW_PAGE, Coverage.OVERLAP_TAIL: Space.WINDOW_PAGE},
    "unified": {Coverage.WINDOW: Space.RING_ROW, Coverage.OVERLAP_TAIL: Space.STATE_ROW},
}
_ANY_MODE_SPACES = {
    Coverage.HISTORY: Space.PAGE,
    Coverage.OPEN_BLOCK: Space.STATE_ROW,
    Coverage.LAST: Space.REQUEST_SLOT,
}
_DTYPE_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e8m0fnu": 1,
    "uint8": 1,
    "int8": 1,
}
_BUG = "this is a bug of the release that built the pools, not of a setting"


@dataclass(frozen=True)
class _RatioRule:
    """Which ratios the draft's layers may have under one algorithm."""

    ratios: frozenset[int]
    text: str
    remedy: str


_RATIO_RULES = {
    "none": _RatioRule(frozenset(), "a pod that doesn't draft has no draft layers", _BUG),
    "mtp": _RatioRule(
        frozenset({0}),
        "every draft layer must be window-only (ratio 0)",
        "use a draft whose layers keep a window and nothing else",
    ),
    "dspark": _RatioRule(
        frozenset({1}),
        "every draft layer must keep each token (ratio 1)",
        "use a draft whose layers attend to the whole context",
    ),
}


@dataclass(frozen=True)
class Problem:
    """One broken rule of one pod. ``found`` shows every geometry involved.

    ``{role}`` in the remedy stands for the pod that breaks it.
    """

    path: str
    found: str
    rule: str
    remedy: str = _BUG


def check_layout(layout: Layout) -> None:
    """Raise ``GeometryError`` naming every rule that ``layout`` breaks."""
    problems = problems_of(layout, _verify_tokens(layout, layout.role))
    if problems:
        text = "; ".join(f"{p.path}: {p.rule} (found {p.found})" for p in problems)
        remedy = problems[0].remedy.format(role=layout.role.upper())
        raise GeometryError(text, stage="start", remedy=remedy)


def broken_rules(prefill: Layout, decode: Layout) -> Iterator[Mismatch]:
    """What ``check_layout`` would say about either pod, as mismatches that show both pods."""
    by_rule: dict[tuple[str, str], dict[Role, Problem]] = {}
    for role, layout in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for problem in problems_of(layout, _verify_tokens(layout, role.value)):
            by_rule.setdefault((problem.path, problem.rule), {})[role] = problem
    for (path, rule), found in by_rule.items():
        problem = next(iter(found.values()))
        where = "both pods" if len(found) == 2 else f"the {next(iter(found)).value} pod"
        name = "<ROLE>" if len(found) == 2 else next(iter(found)).value.upper()
        yield Mismatch(
            path=path,
            prefill_value=found[Role.PREFILL].found if Role.PREFILL in found else "as required",
            decode_value=found[Role.DECODE].found if Role.DECODE in found else "as required",
            severity=Severity.FATAL,
            explanation=f"{rule}; broken on {where}",
            remedy=f"on {where}: {problem.remedy.format(role=name)}",
        )


def problems_of(layout: Layout, verify_tokens: int) -> tuple[Problem, ...]:
    """Every broken rule of one layout. ``verify_tokens``: tokens this pod may write beyond its
    committed state.
    """
    return (
        *_naming(layout),
        *_draft_rules(layout),
        *_scales(layout),
        *_widths(layout),
        *(p for component in layout.components for p in _shares(layout, component)),
        *(p for component in layout.components for p in _component(layout, component)),
        *(p for component in layout.components for p in _rows(layout, component, verify_tokens)),
        *_ring_rows(layout),
    )


def live_rows(component: Component) -> int:
    """The most rows that hold one request's state at a time (see ``Coverage``); 0 for unbounded
    history.
    """
    window = component.window_tokens
    match component.coverage:
        case Coverage.HISTORY:
            return 0
        case Coverage.WINDOW:
            return window
        case Coverage.OVERLAP_TAIL:
            return 2 * window - 1
        case Coverage.OPEN_BLOCK:
            return window - 1
        case Coverage.LAST:
            return 1


def rows_needed(component: Component, verify_tokens: int) -> int:
    """Shortest ring that keeps live rows apart while ``verify_tokens`` uncommitted rows are written
    beyond them.

    A window query reads W - 1 older rows, hence W + T - 1; a tail of ratio R holds at most 2R - 1
    (overlap) or R - 1 (open block) rows before those T.
    """
    older = live_rows(component) - (1 if component.coverage is Coverage.WINDOW else 0)
    return older + verify_tokens


def _verify_tokens(layout: Layout, role: str) -> int:
    """A prefill pod never verifies, so it writes one row at a time beyond committed state."""
    return 1 if role == Role.PREFILL.value else max(1, layout.spec.draft_tokens)


def _naming(layout: Layout) -> Iterator[Problem]:
    names = [component.name for component in layout.components]
    if len(set(names)) != len(names):
        yield Problem("components", render(tuple(names)), "component names must be unique")
    owners = [component.owner for component in layout.components]
    if owners != sorted(owners, key=[Owner.TARGET, Owner.DRAFT].index):
        yield Problem(
            "components",
            render(tuple(f"{c.name}({c.owner.value})" for c in layout.components)),
            "the draft's components must come after all of the target's",
        )
    for component in layout.components:
        if component.name.startswith("draft.") != (component.owner is Owner.DRAFT):
            yield Problem(
                f"components[{component.name}].owner",
                component.owner.value,
                "draft state must be a component of its own, named draft.*",
            )


def _draft_rules(layout: Layout) -> Iterator[Problem]:
    spec, draft = layout.spec, [c for c in layout.components if c.owner is Owner.DRAFT]
    if (spec.algorithm != "none") != bool(draft):
        names = render(tuple(c.name for c in draft))
        yield Problem(
            "spec.algorithm",
            f"algorithm {spec.algorithm}, draft components: {names}",
            "a pod has draft components exactly when it drafts",
        )
    rule = _RATIO_RULES.get(spec.algorithm)
    if rule is None:
        known = render(tuple(_RATIO_RULES))
        yield Problem("spec.algorithm", spec.algorithm, f"the algorithm must be one of {known}")
    elif set(spec.draft_ratios) != rule.ratios:
        yield Problem(
            "spec.draft_ratios",
            f"target ratios {render(layout.geometry.compression_ratios)}, "
            f"draft ratios {render(spec.draft_ratios)}",
            rule.text,
            rule.remedy,
        )
    if spec.algorithm == "dspark":
        yield from _whole_context(draft)
    for window in (c for c in draft if c.coverage is Coverage.WINDOW):
        yield from _draft_window(layout, window)


def _whole_context(draft: Sequence[Component]) -> Iterator[Problem]:
    """A DSPARK draft reads keys and values of every token before its block, and nothing else."""
    fits = [
        component.coverage is Coverage.HISTORY
        and component.kind is Kind.KV
        and component.tokens_per_row == 1
        and component.space is Space.PAGE
        for component in draft
        if component.kind not in SCALE_KINDS
    ]
    if fits != [True]:
        yield Problem(
            "components",
            render(
                tuple(
                    f"{c.name}({c.kind.value} {c.coverage.value} {c.space.value} {c.tokens_per_row})"
                    for c in draft
                )
            ),
            "a dspark draft has one component: KV history, one token a row, in pages",
        )


def _scales(layout: Layout) -> Iterator[Problem]:
    """One row number finds a row's values and its scales, so both components count rows alike."""
    for index, scales in enumerate(layout.components):
        if scales.kind not in SCALE_KINDS:
            continue
        before = layout.components[index - 1] if index else None
        if before is None or before.kind in SCALE_KINDS or not _rows_alike(before, scales):
            yield Problem(
                f"components[{scales.name}]",
                f"after {before.name if before else 'nothing'}",
                "scales come right after the component of their values, with the same layers and rows",
            )


def _widths(layout: Layout) -> Iterator[Problem]:
    tensor, context = layout.parallelism.tensor, layout.parallelism.context
    if tensor < 1 or context < 1 or tensor % context:
        yield Problem(
            "parallelism",
            f"tensor {tensor}, context {context}",
            "context-parallel ranks are groups of the tensor-parallel ones",
            "choose SLUICE_{role}_TP as a multiple of SLUICE_{role}_DCP",
        )


def _shares(layout: Layout, component: Component) -> Iterator[Problem]:
    """Ranks' parts are moved as stretches of bytes of whole rows, the same in every layer."""
    tensor, context = max(1, layout.parallelism.tensor), layout.parallelism.context
    path, shards = f"components[{component.name}]", {e.shards for e in component.entries}
    if any(count < 1 or tensor % count for count in shards):
        rule = "the ranks share a component's parts equally"
        yield Problem(f"{path}.entries", f"{render(tuple(shards))} parts, {tensor} ranks", rule)
    split = {(e.shards, e.shard_axis, e.row_bytes) for e in component.entries}
    if max(shards, default=1) > 1 and (len(split) > 1 or component.entries[0].shard_axis != 0):
        rule = "rows split along their first axis, and alike in every layer"
        yield Problem(f"{path}.entries", f"{len(split)} ways of splitting", rule)
    dealt = component.interleave
    if dealt != 1 and (dealt != context or component.coverage is not Coverage.HISTORY):
        yield Problem(
            f"{path}.interleave",
            f"{dealt}, context {context}, {component.coverage.value}",
            "only history is dealt, to all context-parallel ranks",
        )


def _rows_alike(values: Component, scales: Component) -> bool:
    alike = replace(values, name=scales.name, kind=scales.kind, entries=scales.entries) == scales
    layers = [[entry.layer_id for entry in one.entries] for one in (values, scales)]
    return alike and layers[0] == layers[1]


def _draft_window(layout: Layout, draft: Component) -> Iterator[Problem]:
    """The draft's window lives in the target's slots or through the target's window map, so
    geometry is shared.
    """
    target = next(
        (c for c in layout.components if c.owner is Owner.TARGET and c.coverage is Coverage.WINDOW),
        None,
    )
    path = f"components[{draft.name}]"
    if target is None:
        yield Problem(path, f"target: no window, draft: {geometry_of(draft)}", "no window to share")
        return
    both = f"target: {geometry_of(target)}, draft: {geometry_of(draft)}"
    remedy = "build both from one pool configuration (SLUICE_{role}_POOL_MODE)"
    if draft.space is not target.space:
        rule = "target and draft must both be paged or both unified"
        yield Problem(f"{path}.space", both, rule, remedy)
    for field, what in (
        ("window_tokens", "the same window"),
        ("rows_per_item", "the same rows a page or ring"),
        ("num_items", "the same window pages or rings"),
    ):
        if getattr(draft, field) != getattr(target, field):
            rule = f"target and draft must have {what}"
            yield Problem(f"{path}.{field}", both, rule, remedy)


def geometry_of(component: Component) -> str:
    """``RING_ROW, window 128, 131 rows an item, 17 items``."""
    return (
        f"{component.space.value}, window {component.window_tokens}, "
        f"{component.rows_per_item} rows an item, {component.num_items} items"
    )


def _component(layout: Layout, component: Component) -> Iterator[Problem]:
    path = f"components[{component.name}]"
    mode, coverage = layout.geometry.pool_mode, component.coverage
    wanted = {**_SPACES.get(mode, {}), **_ANY_MODE_SPACES}.get(coverage)
    if component.owner is Owner.TARGET and wanted is not component.space:
        yield Problem(
            f"{path}.space",
            f"{component.space.value} in pool mode {mode}",
            f"{coverage.value} state of a {mode} pool lives in "
            + (wanted.value if wanted else "no known space"),
        )
    layers = [entry.layer_id for entry in component.entries]
    known = len(layout.geometry.compression_ratios)
    strays = [i for i in layers if i >= known] if component.owner is Owner.TARGET and known else []
    if strays or len(set(layers)) != len(layers):
        yield Problem(
            f"{path}.entries",
            f"layers {render(tuple(layers))} of a target with {known} layers",
            "a target component has one entry a target layer at most, and none of the draft's",
        )
    if coverage is Coverage.WINDOW and component.window_tokens != layout.geometry.window_tokens:
        yield Problem(
            f"{path}.window_tokens",
            f"component {component.window_tokens}, geometry {layout.geometry.window_tokens}",
            "every window is as long as geometry.window_tokens",
        )
    if layout.geometry.byte_layout.split("+")[0] == "rows":  # what is added are rows as well
        yield from _row_bytes(path, component)


def _row_bytes(path: str, component: Component) -> Iterator[Problem]:
    for index, entry in enumerate(component.entries):
        size = _DTYPE_BYTES.get(entry.dtype)
        if size is not None and entry.row_bytes != math.prod(entry.row_shape) * size:
            yield Problem(
                f"{path}.entries[{index}].row_bytes",
                f"{entry.row_bytes} for {entry.dtype}[{render(entry.row_shape)}]",
                "a row is as large as its shape and type say",
            )


def _rows(layout: Layout, component: Component, verify_tokens: int) -> Iterator[Problem]:
    path = f"components[{component.name}].rows_per_item"
    rows, page = component.rows_per_item, layout.geometry.page_tokens * layout.parallelism.context
    paged = component.space in (Space.PAGE, Space.WINDOW_PAGE)
    if component.space is Space.REQUEST_SLOT and rows != 1:
        yield Problem(path, str(rows), "a request slot holds one row")
    if paged and not is_ring(component) and rows * component.tokens_per_row != page:
        yield Problem(
            path,
            f"{rows} rows of {component.tokens_per_row} tokens in a page of {page} tokens",
            "a page's rows must cover exactly its tokens",
            "make SLUICE_{role}_PAGE_TOKENS a multiple of every compression ratio",
        )
    if not is_ring(component):
        return
    if paged and (rows == 0 or page % rows):
        yield Problem(
            path,
            f"{rows} rows in a page of {page} tokens",
            "a tail's rows must divide the page, or rows of two pages would fall together",
        )
    needed = rows_needed(component, verify_tokens)
    if rows < needed:
        yield Problem(
            path,
            f"{rows} rows, {needed} needed ({geometry_of(component)}, "
            f"{verify_tokens} tokens verified a step)",
            "a ring must hold all live rows and the ones being verified",
            "lower SLUICE_{role}_SPEC_STEPS, or build the ring for it",
        )


def _ring_rows(layout: Layout) -> Iterator[Problem]:
    stated = layout.geometry.ring_rows
    rings = [c for c in layout.components if c.space is Space.RING_ROW]
    odd = [c for c in rings if c.owner is Owner.TARGET and c.rows_per_item != stated]
    if odd or (not rings and stated):
        strides = render(tuple(f"{c.name}={c.rows_per_item}" for c in rings))
        yield Problem(
            "geometry.ring_rows",
            f"{stated}, rings: {strides}",
            "geometry.ring_rows must be the stride of the window rings, 0 in paged mode",
        )
