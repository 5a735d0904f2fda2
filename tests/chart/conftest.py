"""Both Helms, found once."""

from __future__ import annotations

import pytest

from tests.chart.helm import Helm, find_helm


@pytest.fixture(scope="session")
def helm4() -> Helm:
    return find_helm(4)


@pytest.fixture(scope="session")
def helm3() -> Helm:
    return find_helm(3)


@pytest.fixture(scope="session", params=[4, 3], ids=["helm4", "helm3"])
def helm(request: pytest.FixtureRequest) -> Helm:
    return find_helm(request.param)
