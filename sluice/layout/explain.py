"""Layouts, agreements and refusals in words: what ``sluice layout show`` and ``diff`` print."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sluice.layout.columns import columns, layers, size
from sluice.layout.component import Component, Coverage
from sluice.layout.consistency import live_rows
from sluice.layout.encoding import fingerprint
from sluice.layout.explain_ranks import explain_writers
from sluice.layout.layout import Layout
from sluice.layout.outcome import Agreement, DraftHandover, Mismatch, Refusal, Severity, shorten
from sluice.layout.rules import render
from sluice.layout.span import live_ordinals

_WIDTH = 100
_VALUE_WIDTH = 76
_DRAFT = {
    DraftHandover.NONE: "neither pod drafts",
    DraftHandover.SENT: "sent: decode's first step drafts from transferred state",
    DraftHandover.WITHHELD: "not sent: decode marks the draft window invalid",
    DraftHandover.UNUSED: "not sent: decode doesn't speculate",
}


@dataclass(frozen=True)
class Moved:
    """What one component of one prompt comes to."""

    name: str
    rows: int
    num_bytes: int


def moved(layout: Layout, length: int, have: int = 0) -> tuple[Moved, ...]:
    """Rows and bytes that each component of a prompt of ``length`` tokens moves over all its layers.

    ``have``: tokens whose history the receiver already holds.
    """
    return tuple(moved_by(component, length, have) for component in layout.components)


def moved_by(component: Component, length: int, have: int = 0) -> Moved:
    """``moved`` of one component."""
    rows = len(live_ordinals(component, length, have))
    return Moved(component.name, rows, rows * component.bytes_per_row)


def explain_layout(layout: Layout, length: int | None = None) -> str:
    """A pod's identity, its components as a table, and what a prompt of ``length`` tokens moves."""
    parts = [_identity(layout), _inventory(layout)]
    if length is not None:
        parts.append(_prompt(layout, length))
    return "\n\n".join(parts) + "\n"


def explain_outcome(outcome: Agreement | Refusal) -> str:
    """An agreement with its notes, or every reason for a refusal, grouped by severity."""
    if isinstance(outcome, Refusal):
        return _refusal(outcome)
    return _agreement(outcome)


def coverage_in_words(component: Component) -> str:
    """Which rows of a prompt are live, as a sentence fragment."""
    window = component.window_tokens
    match component.coverage:
        case Coverage.HISTORY if component.tokens_per_row == 1:
            return "every token"
        case Coverage.HISTORY:
            return f"every full block of {component.tokens_per_row} tokens"
        case Coverage.WINDOW:
            return f"the last {window} tokens"
        case Coverage.OVERLAP_TAIL:
            return f"the open block of {window} tokens and the one before"
        case Coverage.OPEN_BLOCK:
            return f"the open block of {window} tokens"
        case Coverage.LAST:
            return "one row, as of the newest token"


def cost_in_words(component: Component) -> str:
    """Bytes a token for history, the most bytes a request for everything else."""
    if component.coverage is Coverage.HISTORY:
        return f"{size(bytes_per_token(component))} a token"
    return f"{size(most_request_bytes(component))} a request"


def bytes_per_token(component: Component) -> float:
    """What each further token adds over all layers, on average; 0 for all but history."""
    if component.coverage is not Coverage.HISTORY:
        return 0
    return component.bytes_per_row / component.tokens_per_row


def most_request_bytes(component: Component) -> int:
    """The most that is live of one request over all layers; 0 for history, which has no bound."""
    return live_rows(component) * component.bytes_per_row


def _identity(layout: Layout) -> str:
    model, geometry, spec, split = layout.model, layout.geometry, layout.spec, layout.parallelism
    window = f"window {geometry.window_tokens}"
    ring = f", window rings of {geometry.ring_rows} rows" if geometry.ring_rows else ""
    speculation = (
        f"{spec.algorithm}, {spec.steps} steps, {spec.draft_tokens} tokens verified a step"
        if spec.algorithm != "none"
        else "none"
    )
    facts = [
        ("role", layout.role),
        ("model", f"{model.architecture}, weights {model.weights_digest[:12] or 'unknown'}"),
        (
            "state",
            f"{geometry.pool_mode}, pages of {geometry.page_tokens} tokens, {window}{ring}, "
            f"{geometry.kv_dtype}, byte layout {geometry.byte_layout}",
        ),
        ("parallel", f"tensor {split.tensor}, context {split.context}, rank {split.rank}"),
        ("draft", speculation),
        ("fingerprint", fingerprint(layout)),
    ]
    return "\n".join(columns(facts, indent=""))


def _inventory(layout: Layout) -> str:
    header = ("component", "owner", "kind", "space", "layers", "row", "holds", "costs")
    rows = [
        (
            component.name,
            component.owner.value,
            component.kind.value,
            component.space.value,
            layers([entry.layer_id for entry in component.entries]),
            row_in_words(component),
            coverage_in_words(component),
            cost_in_words(component),
        )
        for component in layout.components
    ]
    return "\n".join(columns([header, *rows], right=frozenset({7}), indent=""))


def row_in_words(component: Component) -> str:
    """``512 x bfloat16 = 1 KiB`` where the layers agree, else the sum over all layers."""
    if len({(e.dtype, e.row_shape, e.row_bytes) for e in component.entries}) != 1:
        return f"{size(component.bytes_per_row)} over all layers"
    entry = component.entries[0]
    shape = "x".join(map(str, entry.row_shape))
    return f"{shape} {entry.dtype} = {size(entry.row_bytes)}"


def _prompt(layout: Layout, length: int) -> str:
    parts = moved(layout, length)
    total = sum(part.num_bytes for part in parts)
    rows = [
        (part.name, f"{part.rows}", size(part.num_bytes), _share(part.num_bytes, total))
        for part in parts
    ]
    table = [("component", "rows a layer", "bytes", "share"), *rows]
    table.append(("total", "", size(total), _share(total, total)))
    lines = columns(table, right=frozenset({1, 2, 3}))
    return "\n".join([f"a prompt of {length} tokens moves {size(total)}:", *lines])


def _share(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %" if total else "0 %"


def _agreement(agreement: Agreement) -> str:
    lines = [
        f"agreed: {_count(len(agreement.plans), 'component')} will be sent",
        f"  digest  {agreement.digest}",
        f"  draft   {_DRAFT[agreement.draft]}",
        "",
    ]
    rows = [
        (plan.name, coverage_in_words(plan.prefill), cost_in_words(plan.prefill))
        for plan in agreement.plans
    ]
    lines += columns([("component", "what is sent", "costs"), *rows], right=frozenset({2}))
    lines += explain_writers(agreement)
    lines += _groups(agreement.notes)
    return "\n".join(lines) + "\n"


def _refusal(refusal: Refusal) -> str:
    lines = [f"refused: {refusal.count()}; no state may move between these pods"]
    lines += _groups(refusal.mismatches)
    return "\n".join(lines) + "\n"


def _groups(mismatches: Sequence[Mismatch]) -> list[str]:
    lines: list[str] = []
    for severity, title in (
        (Severity.FATAL, "fatal: must be changed"),
        (Severity.CONVERTIBLE, "convertible: handled, nothing to do"),
        (Severity.HARMLESS, "harmless"),
    ):
        group = [m for m in mismatches if m.severity is severity]
        if group:
            lines += ["", title]
        causes = {m.path for m in group if not m.cause}
        for alike in _alike([m for m in group if m.cause not in causes]):
            effects = [m for m in group if m.cause in {one.path for one in alike}]
            lines += ["", *_mismatch(alike, effects)]
    return lines


def _alike(mismatches: Sequence[Mismatch]) -> list[list[Mismatch]]:
    """Mismatches that differ in nothing but their path, together."""
    groups: dict[Mismatch, list[Mismatch]] = {}
    for mismatch in mismatches:
        groups.setdefault(replace(mismatch, path=""), []).append(mismatch)
    return list(groups.values())


def _mismatch(alike: Sequence[Mismatch], effects: Sequence[Mismatch]) -> list[str]:
    first = alike[0]
    prefill, decode = _focus(first.prefill_value, first.decode_value)
    facts = [("prefill", prefill), ("decode", decode), ("why", first.explanation)]
    if first.remedy:
        facts.append(("fix", first.remedy))
    lines = [f"  {mismatch.path}" for mismatch in alike]
    for label, text in facts:
        wrapped = textwrap.wrap(text, _WIDTH - 13, break_on_hyphens=False) or [""]
        lines.append(f"    {label:<7}  {wrapped[0]}")
        lines += [" " * 13 + line for line in wrapped[1:]]
    rows = [(f"  {m.path}", shorten(m.prefill_value), shorten(m.decode_value)) for m in effects]
    if rows:
        lines += columns([("and so", "prefill", "decode"), *rows], indent="    ")
    return lines


def _focus(prefill: str, decode: str) -> tuple[str, str]:
    """Long lists cut down to where they first differ; sentences are left whole."""
    if max(len(prefill), len(decode)) <= _VALUE_WIDTH:
        return prefill, decode
    ours, theirs = prefill.split(" "), decode.split(" ")
    if any(not word.isalnum() for word in ours + theirs):
        return prefill, decode
    same = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    return _around(ours, same), _around(theirs, same)


def _around(words: list[str], index: int) -> str:
    start, stop = max(0, index - 2), min(len(words), index + 6)
    shown = render(tuple(words[start:stop]))
    before, after = ("... " if start else ""), (" ..." if stop < len(words) else "")
    return f"{len(words)} values, from number {start}: {before}{shown}{after}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
