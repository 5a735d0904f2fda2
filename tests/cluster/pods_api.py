"""Pods of a fleet as Kubernetes objects: made, made ready, deleted, through the plain HTTP API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

_PATH = "/api/v1/namespaces/default/pods"
LABELS = {"app.kubernetes.io/name": "sluice"}


@dataclass(frozen=True)
class PodsApi:
    """``http`` speaks to the API server as an administrator."""

    http: httpx.Client

    def create(self, name: str, role: str, port: int = 7000, **metadata: Any) -> None:
        labels = LABELS | {"app.kubernetes.io/component": role}
        container = {
            "name": "main",
            "image": "none",
            "ports": [{"name": "grpc", "containerPort": port, "protocol": "TCP"}],
        }
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels, **metadata},
            # Bound to a node that nobody plays: the tests are its kubelet.
            "spec": {"nodeName": "nowhere", "containers": [container]},
        }
        self.http.post(_PATH, json=body).raise_for_status()

    def set_status(self, name: str, ip: str, *, ready: bool) -> None:
        status = {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        }
        self.http.patch(
            f"{_PATH}/{name}/status",
            json={"status": status},
            headers={"content-type": "application/strategic-merge-patch+json"},
        ).raise_for_status()

    def ready(self, name: str, role: str, ip: str, **metadata: Any) -> None:
        self.create(name, role, **metadata)
        self.set_status(name, ip, ready=True)

    def delete(self, name: str, grace_s: int = 30) -> None:
        """With a grace the object stays, with a deletionTimestamp, until ``vanish``."""
        self.http.request(
            "DELETE", f"{_PATH}/{name}", json={"gracePeriodSeconds": grace_s}
        ).raise_for_status()

    def vanish(self, name: str) -> None:
        self.delete(name, 0)

    def clear(self) -> None:
        for item in self.http.get(_PATH).json()["items"]:
            self.vanish(item["metadata"]["name"])

    def grant(self, user: str, verbs: list[str]) -> None:
        """A Role on pods for the user, and its binding."""
        group = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
        role = {
            "metadata": {"name": f"pods-{user}"},
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": verbs}],
        }
        binding = {
            "metadata": {"name": f"pods-{user}"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "Role",
                "name": f"pods-{user}",
            },
            "subjects": [{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}],
        }
        self.http.post(f"{group}/roles", json=role).raise_for_status()
        self.http.post(f"{group}/rolebindings", json=binding).raise_for_status()
