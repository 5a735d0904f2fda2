"""The settings that remedies name exist on the pods they name."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from services.decode.settings import DecodeSettings
from services.pod_settings import PodSettings
from services.prefill.settings import PrefillSettings
from sluice.layout.component import Component
from sluice.layout.layout import Layout
from sluice.layout.negotiate import negotiate
from sluice.layout.outcome import Agreement
from sluice.layout.rules import RULES, is_harmless, is_ring, render
from tests.unit.layout.example_layouts import SMALL, Pod, layout_of, pair, with_component

SETTINGS: dict[str, type[PodSettings]] = {"PREFILL": PrefillSettings, "DECODE": DecodeSettings}


def remedies() -> Iterator[str]:
    yield from (rule.remedy for rule in RULES.values())
    pods = [layout_of(SMALL, Pod(mode=m, steps=s)) for m in ("paged", "unified") for s in (0, 3)]
    pods.append(with_component(pods[1], "target.c4_tail", rows_per_item=8))
    pods.append(with_component(pods[1], "draft.swa", num_items=8))
    for prefill in pods:
        for decode in pods:
            outcome = negotiate(prefill, decode)
            if not isinstance(outcome, Agreement):
                yield from (m.remedy for m in outcome.mismatches)


def test_every_setting_named_in_a_remedy_exists() -> None:
    named = {
        match.groups()
        for text in remedies()
        for match in re.finditer(r"SLUICE_([A-Z]+)_([A-Z_]+)", text)
    }
    assert len(named) >= 8
    for role, name in named:
        assert name.lower() in SETTINGS[role].model_fields, f"SLUICE_{role}_{name}"


def test_every_fatal_rule_says_what_to_do() -> None:
    for name, rule in RULES.items():
        assert rule.why, name
        assert bool(rule.remedy) == (rule.severity.value == "fatal"), name


@pytest.mark.parametrize(
    ("value", "text"),
    [((), "none"), ("", "none"), (None, "none"), ((0, 4), "0 4"), (0, "0"), ("x", "x")],
)
def test_values_are_rendered_for_people(value: object, text: str) -> None:
    assert render(value) == text


def test_harmless_is_said_of_capacity_role_and_rank_alone() -> None:
    harmless = {name for name in RULES if RULES[name].severity.value == "harmless"}
    assert harmless == {"Layout.role", "Parallelism.rank", "Component.num_items"}
    assert is_harmless(Component, "num_items")
    assert not is_harmless(Layout, "wire_version")


def test_rings_are_what_is_reused_by_position() -> None:
    paged, unified = (pair(mode=mode)[1] for mode in ("paged", "unified"))
    assert {c.name for c in paged.components if is_ring(c)} == {
        "target.c4_tail",
        "target.c4_indexer_tail",
        "target.c128_tail",
    }
    assert {c.name for c in unified.components if is_ring(c)} == {
        "target.swa_ring",
        "target.c4_tail",
        "target.c4_indexer_tail",
        "target.c128_tail",
        "draft.swa_ring",
    }
