"""Every rendered object is valid where the chart is supported, and keeps the house's rules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.chart.helm import CASES, NEWEST, OLDEST, SCHEMAS, Helm, case_name

Object = dict[str, Any]


@pytest.fixture(scope="module", params=CASES, ids=case_name)
def objects(request: pytest.FixtureRequest, helm4: Helm) -> list[Object]:
    return helm4.objects(request.param)


@pytest.fixture(scope="module")
def seen() -> set[str]:
    """What was validated already: most objects are the same whatever the values."""
    return set()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the validator's own imports
def test_objects_are_valid_on_the_newest_and_the_oldest_server(
    objects: list[Object], seen: set[str]
) -> None:
    for thing in objects:
        for part in _builtin_parts(thing):
            text = json.dumps(part)
            if text in seen:
                continue
            seen.add(text)
            kubernetes_validate.validate(part, NEWEST, strict=True)
            if "resourceClaims" not in text:  # DRA is newer; its presets ask for a newer server
                kubernetes_validate.validate(part, OLDEST, strict=True)


def test_custom_resources_fit_their_schemas(objects: list[Object]) -> None:
    for thing in objects:
        if _is_custom(thing):
            schema = json.loads((SCHEMAS / f"{thing['kind']}.json").read_text())
            jsonschema.validate(thing, schema, jsonschema.Draft202012Validator)


def test_every_port_says_tcp(objects: list[Object]) -> None:
    """Server-side apply, Helm 4's default, needs the protocol: it is part of a port's key."""
    ports = [
        port for pod in _pods(objects) for c in pod["containers"] for port in c.get("ports", ())
    ]
    ports += [p for o in objects if o["kind"] == "Service" for p in o["spec"]["ports"]]
    assert ports
    assert {port.get("protocol") for port in ports} == {"TCP"}


def test_pods_are_restricted(objects: list[Object]) -> None:
    """Kubernetes' restricted profile, IPC_LOCK alone excepted, and a read-only root on top."""
    for pod in _pods(objects):
        asks_root = pod["securityContext"]["runAsUser"] == 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        ours = [c for c in [*pod["containers"], *pod.get("initContainers", ())] if _is_ours(c)]
        assert ours
        for container in ours:
            context = container["securityContext"]
            capabilities = context["capabilities"]
            assert capabilities["drop"] == ["ALL"]
            assert set(capabilities.get("add", ())) <= {"IPC_LOCK"}
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert pod["securityContext"]["runAsNonRoot"] is not asks_root
            assert (
                not asks_root
                or capabilities.get("add") == ["IPC_LOCK"]
                or container["name"] == "router"
            )


def test_grace_covers_the_drain(objects: list[Object]) -> None:
    for pod in _pods(objects):
        for container in pod["containers"]:
            if "lifecycle" in container:
                before = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
                drain = next(
                    int(e["value"]) for e in container["env"] if e["name"].endswith("_DRAIN_S")
                )
                assert pod["terminationGracePeriodSeconds"] > before + drain


def test_accounts_may_only_read_pods(objects: list[Object]) -> None:
    rules = [rule for o in objects if o["kind"] == "Role" for rule in o["rules"]]
    assert all(
        rule == {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
        for rule in rules
    )
    assert not [o for o in objects if o["kind"].startswith("Cluster") and "rbac" in o["apiVersion"]]


def test_prefill_pods_hold_no_token(objects: list[Object]) -> None:
    for pod in _pods(objects):
        if any(c["name"] == "prefill" for c in pod["containers"]):
            assert pod["automountServiceAccountToken"] is False


def _is_ours(container: Object) -> bool:
    return container["name"] in ("router", "prefill", "decode", "preflight", "pairs")


def _is_custom(thing: Object) -> bool:
    group = thing["apiVersion"].rpartition("/")[0]
    return ("." in group and not group.endswith(".k8s.io")) or group in _CUSTOM_K8S_GROUPS


_CUSTOM_K8S_GROUPS = (
    "gateway.networking.k8s.io",
    "inference.networking.k8s.io",
    "leaderworkerset.x-k8s.io",
)


def _builtin_parts(thing: Object) -> Iterator[Object]:
    """The object itself, or the pods inside one that no bundled schema knows."""
    if not _is_custom(thing):
        yield thing
    elif thing["kind"] == "LeaderWorkerSet":
        for name in ("leaderTemplate", "workerTemplate"):
            template = thing["spec"]["leaderWorkerTemplate"][name]
            yield {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": thing["metadata"],
                "template": template,
            }


def _pods(objects: list[Object]) -> list[Object]:
    """Every pod spec, wherever it is."""
    found: list[Object] = []
    for thing in objects:
        spec = thing.get("spec", {})
        group = spec.get("leaderWorkerTemplate", {})
        templates = [spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")]
        found += [template["spec"] for template in templates if template]
        if thing["kind"] == "Pod":
            found.append(spec)
    return found
