"""What the chart renders, kept: the default and the presets in full, every other values file as its difference from the
default. ``make chart-golden`` writes them anew; the difference in review is the point.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

from tests.chart.helm import CASES, CHART, GOLDEN, PRESETS, ROOT, Helm, case_name


def golden_files(helm: Helm) -> dict[Path, str]:
    """Every golden file with what it should hold."""
    default = helm.rendered(None)
    files = {}
    for case in CASES:
        rendered, name = helm.rendered(case), case_name(case)
        if case is None or case in PRESETS:
            files[GOLDEN / f"{name}.yaml"] = rendered
        else:
            files[GOLDEN / f"{name}.diff"] = _difference(default, rendered)
    return files


def _difference(default: str, rendered: str) -> str:
    lines = difflib.unified_diff(
        default.splitlines(),
        rendered.splitlines(),
        "default",
        "with these values",
        lineterm="",
        n=4,
    )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def main() -> int:
    helm = Helm(ROOT / ".cache/helm/helm4")
    wanted = golden_files(helm)
    for file in set(GOLDEN.iterdir()) - wanted.keys():
        file.unlink()
    for file, text in wanted.items():
        file.write_text(text, encoding="utf-8")
    print(f"{len(wanted)} golden files of {CHART.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
