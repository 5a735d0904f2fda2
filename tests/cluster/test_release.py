"""A release's life on a real API server: what Helm sends is accepted, changed, taken back and removed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chart.helm import CHART, Helm, HelmFailed, find_helm
from tests.cluster.apiserver import ApiServer

OLD_SERVER = Path(__file__).parent / "node-values.yaml"
KINDS = (
    "apis/apps/v1/namespaces/default/deployments",
    "api/v1/namespaces/default/services",
    "api/v1/namespaces/default/serviceaccounts",
    "apis/rbac.authorization.k8s.io/v1/namespaces/default/roles",
    "apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings",
    "apis/networking.k8s.io/v1/namespaces/default/networkpolicies",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(tmp_path_factory.mktemp("api")) as running:
        yield running


def objects(server: ApiServer) -> dict[str, dict[str, Any]]:
    """By kind and name: everything of the release."""
    found = {}
    with server.client() as http:
        for path in KINDS:
            answer = http.get(
                f"/{path}", params={"labelSelector": "app.kubernetes.io/instance=rel"}
            )
            for item in answer.raise_for_status().json()["items"]:
                found[f"{path.rpartition('/')[2]}/{item['metadata']['name']}"] = item
    return found


def settings(server: ApiServer, role: str) -> dict[str, str]:
    deployment = objects(server)[f"deployments/rel-sluice-{role}"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {e["name"]: e.get("value", "") for e in container["env"]}


@pytest.mark.parametrize("major", [4, 3])
def test_install_upgrade_rollback_uninstall(server: ApiServer, major: int) -> None:
    helm, access = find_helm(major), ("--kubeconfig", str(server.kubeconfig()))
    values = ("--values", str(OLD_SERVER))
    helm.run("install", "rel", str(CHART), *values, *access)
    installed = objects(server)
    assert {name for name in installed if name.startswith("deployments/")} == {
        f"deployments/rel-sluice-{role}" for role in ("router", "prefill", "decode")
    }
    assert settings(server, "decode")["SLUICE_DECODE_DISCOVERY"] == "kubernetes"
    assert "SLUICE_DECODE_PAGE_TOKENS" not in settings(server, "decode")

    changed = ("--set", "engine.page_tokens=256", "--set", "decode.replicas=3")
    helm.run("upgrade", "rel", str(CHART), *values, *changed, *access)
    assert settings(server, "decode")["SLUICE_DECODE_PAGE_TOKENS"] == "256"
    assert objects(server)["deployments/rel-sluice-decode"]["spec"]["replicas"] == 3

    with pytest.raises(HelmFailed, match="the router computes nothing"):
        helm.run("upgrade", "rel", str(CHART), *values, "--set", "router.gpu.count=1", *access)
    assert objects(server)["deployments/rel-sluice-decode"]["spec"]["replicas"] == 3

    helm.run("rollback", "rel", "1", *access)
    assert "SLUICE_DECODE_PAGE_TOKENS" not in settings(server, "decode")
    assert objects(server)["deployments/rel-sluice-decode"]["spec"]["replicas"] == 1
    revisions = json.loads(helm.run("history", "rel", "-o", "json", *access))
    assert revisions[-1]["status"] == "deployed"

    helm.run("uninstall", "rel", *access)
    assert objects(server) == {}


def test_a_server_too_old_is_refused_in_a_sentence(server: ApiServer) -> None:
    with pytest.raises(HelmFailed, match=r"Kubernetes is v\d.*the chart needs 1\.99"):
        Helm(find_helm(4).program).run(
            *("install", "other", str(CHART), "--values", str(OLD_SERVER)),
            *("--set-string", "minimumKubernetes=1.99", "--kubeconfig", str(server.kubeconfig())),
        )
