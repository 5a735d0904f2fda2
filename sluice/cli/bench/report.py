"""What a finished load is reported from, and its JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from sluice.cli.bench.sample import Sample
from sluice.cli.bench.summary import Slo, Summary


@dataclass(frozen=True)
class Report:
    """Everything that is written. ``options`` are those of the command line, without the key."""

    title: str
    url: str
    model: str
    loop: str
    options: str
    interrupted: bool
    slo: Slo
    summary: Summary
    samples: tuple[Sample, ...]

    def slo_text(self) -> str:
        """Empty when nothing was asked."""
        limits = (("TTFT", self.slo.ttft_s), ("TPOT", self.slo.tpot_s), ("E2E", self.slo.e2e_s))
        return ", ".join(
            f"{name} {1000 * limit:g} ms" for name, limit in limits if limit is not None
        )


def figures_json(report: Report) -> str:
    """All but the samples."""
    figures = asdict(report)
    del figures["samples"]
    return json.dumps(figures, indent=2)


def report_json(report: Report) -> str:
    """With every sample, so that other questions can be asked of it later."""
    return json.dumps(asdict(report), indent=1)
