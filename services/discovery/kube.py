"""Pods known from the Kubernetes API: list, then watch, by label; needs get, list and watch on pods and nothing else.

A pod's role is its label ``app.kubernetes.io/component``; its address is its IP with the port of annotation
``sluice.dev/port`` or of the container port named ``grpc``. It is ready by its Ready condition, draining from the
moment its deletion is asked for, and gone when its object is, or when it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import client, config

from services.discovery.registry import PodRecord, PodState, Registry
from sluice.errors import ConfigError, NotReady, SluiceError
from sluice.telemetry.logging import get_logger
from sluice.types import Role

ROLE_LABEL = "app.kubernetes.io/component"
PORT_ANNOTATION = "sluice.dev/port"
PORT_NAME = "grpc"

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_WATCH_S = 60  # the server ends a watch then, and we go on where it ended
_LATE_S = 10.0  # a watch that doesn't end in time hangs on a dead connection
_LIST_TIMEOUT_S = 20.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 5.0
_ROLES = {role.value: role for role in (Role.PREFILL, Role.DECODE)}
_log = get_logger(__name__)

Object = Mapping[str, Any]  # a Kubernetes object as JSON; it goes no further than this module


class _Expired(Exception):
    """410: the version to watch from is too old; list again."""


class KubernetesSource:
    """``namespace`` empty = this pod's own. Credentials: the service account's, else the kubeconfig's."""

    def __init__(self, namespace: str, selector: str, watch_s: int = _WATCH_S) -> None:
        self._namespace = namespace
        self._selector = selector
        self._watch_s = watch_s

    async def watch(self, registry: Registry) -> None:
        """While the API can't be reached the last good view stays; pods that died meanwhile show elsewhere."""
        pause_s = _FIRST_PAUSE_S
        while True:
            before = registry.view.version
            try:
                async with self._api() as api:
                    await self._follow(api, registry)
            except _Expired:
                _log.info("discovery_relists")
            except Exception as error:  # whatever it was: the loop must go on, and say it
                registry.trouble(f"discovery by the Kubernetes API: {_short(error)}")
            pause_s = _FIRST_PAUSE_S if registry.view.version > before else pause_s
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, _MAX_PAUSE_S)

    @asynccontextmanager
    async def _api(self) -> AsyncIterator[client.ApiClient]:
        """Made anew after every trouble, so that rotated credentials are read again."""
        settings = client.Configuration()
        try:
            config.load_incluster_config(  # type: ignore[no-untyped-call]
                client_configuration=settings
            )
        except config.ConfigException:
            try:
                await config.load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=os.environ.get("KUBECONFIG"), client_configuration=settings
                )
            except config.ConfigException as error:
                raise ConfigError(
                    f"no credentials: {error}",
                    stage="discovery",
                    remedy="run in a pod with a service account, or set KUBECONFIG",
                ) from error
        async with client.ApiClient(settings) as api:
            yield api

    async def _follow(self, api: client.ApiClient, registry: Registry) -> None:
        """One list and the watches that follow from it; ends by raising."""
        namespace = self._namespace or _own_namespace()
        listing = await self._list(api, namespace)
        pods: dict[str, PodRecord] = {}
        for item in listing["items"]:
            _apply(pods, "ADDED", item)
        registry.replace(pods.values())
        version = listing["metadata"]["resourceVersion"]
        while True:
            async with contextlib.aclosing(self._events(api, namespace, version)) as events:
                async for kind, item in events:
                    version = item["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        _apply(pods, kind, item)
                        registry.replace(pods.values())
            await asyncio.sleep(_FIRST_PAUSE_S)  # a server that ends watches at once isn't hammered

    async def _list(self, api: client.ApiClient, namespace: str) -> Any:
        response = await self._get(api, namespace, {}, _LIST_TIMEOUT_S)
        async with response:
            body = await response.read()
        _check(response.status, body)
        return json.loads(body)

    async def _events(
        self, api: client.ApiClient, namespace: str, version: str
    ) -> AsyncGenerator[tuple[str, Object]]:
        query = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(self._watch_s),
        }
        response = await self._get(api, namespace, query, self._watch_s + _LATE_S)
        async with response:
            if response.status != 200:
                _check(response.status, await response.read())
            async for line in _lines(response.content):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    _check(int(event["object"].get("code", 500)), line)
                yield event["type"], event["object"]

    async def _get(
        self, api: client.ApiClient, namespace: str, query: Mapping[str, str], timeout_s: float
    ) -> aiohttp.ClientResponse:
        """Without the client's typed API: building its models takes two CPU seconds, which would stop this loop."""
        request = await api.param_serialize(
            "GET",
            f"/api/v1/namespaces/{namespace}/pods",
            query_params=[("labelSelector", self._selector), *query.items()],
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        answer = await api.call_api(*request, _request_timeout=timeout_s)
        response: aiohttp.ClientResponse = answer.response
        return response


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length; a cut one at the end is dropped."""
    buffer = b""
    async for chunk in content.iter_any():
        *whole, buffer = (buffer + chunk).split(b"\n")
        for line in whole:
            if line.strip():
                yield line


def _check(status: int, body: bytes) -> None:
    if status == 410:
        raise _Expired
    if status in (401, 403):
        raise NotReady(
            f"the API answered {status}: {_message(body)}",
            remedy="give the service account a Role with get, list and watch on pods",
        )
    if status != 200:
        raise NotReady(f"the API answered {status}: {_message(body)}")


def _message(body: bytes) -> str:
    with contextlib.suppress(ValueError, AttributeError):
        status = json.loads(body)
        return str(status.get("object", status).get("message", ""))[:300]
    return body[:300].decode(errors="replace")


def _apply(pods: dict[str, PodRecord], kind: str, item: Object) -> None:
    name = item["metadata"]["name"]
    record = None if kind == "DELETED" else record_of(item)
    if record is None:
        pods.pop(name, None)
    else:
        pods[name] = record


def record_of(pod: Object) -> PodRecord | None:
    """None for a pod that serves no role, has no address yet, or has ended."""
    metadata, status = pod["metadata"], pod.get("status", {})
    role = _ROLES.get(metadata.get("labels", {}).get(ROLE_LABEL, ""))
    port, host = _port(pod), status.get("podIP", "")
    if role is None or not (host and port) or status.get("phase") in ("Succeeded", "Failed"):
        return None
    state = PodState.STARTING
    if metadata.get("deletionTimestamp"):
        state = PodState.DRAINING
    elif any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in status.get("conditions", ())
    ):
        state = PodState.READY
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return PodRecord(role, address, state, metadata["name"])


def _port(pod: Object) -> int:
    """0 = it names none."""
    stated = str(pod["metadata"].get("annotations", {}).get(PORT_ANNOTATION, ""))
    if stated.isdecimal():
        return int(stated)
    ports = (
        port
        for container in pod.get("spec", {}).get("containers", ())
        for port in container.get("ports", ())
    )
    return next((int(p["containerPort"]) for p in ports if p.get("name") == PORT_NAME), 0)


def _own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError as error:
        raise ConfigError(
            "no namespace is known",
            stage="discovery",
            remedy="set DISCOVERY_NAMESPACE, or run in a pod with a service account",
        ) from error


def _short(error: Exception) -> str:
    if isinstance(error, SluiceError):
        return str(error)
    return f"{type(error).__name__}: {error}"
