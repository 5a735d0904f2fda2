"""One release's life on a real node: installed, scaled, upgraded, killed, drained, rolled back, encrypted, removed.

Run by ``make test-cluster``, in this order; not collected by a plain pytest.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from sluice.errors import PeerLost, WrongRole
from sluice.rpc.tls import PeerRole
from tests.cluster.certificates import Certificates
from tests.cluster.release import NAME, Load, PodOnNode, Release, complete

A = ("common.labels.layout=a",)
B = ("common.labels.layout=b", "engine.page_tokens=256")
C = ("common.labels.layout=c", "engine.page_tokens=512")
# As the GPU presets roll, since spare GPUs are rare: one pod goes before the next comes.
NO_SPARE = tuple(
    f"{role}.strategy.rollingUpdate.{setting}"
    for role in ("prefill", "decode")
    for setting in ("maxSurge=0", "maxUnavailable=1")
)


@pytest.fixture(scope="module")
def release() -> Release:
    return Release()


@pytest.fixture(scope="module")
def url(release: Release) -> str:
    return release.url()


@pytest.fixture(autouse=True)
def told(request: pytest.FixtureRequest, release: Release) -> Iterator[None]:
    """After a failure: what the cluster says."""
    before = request.session.testsfailed
    yield
    if request.session.testsfailed > before:
        print(release.kubectl("get", "pods", "-o", "wide"))
        print(release.kubectl("get", "events", "--sort-by=.lastTimestamp"))


def ready(release: Release, role: str) -> list[PodOnNode]:
    return [pod for pod in release.pods(role) if pod.ready and not pod.leaving]


def test_install_waits_until_a_pair_can_serve(release: Release) -> None:
    """``--wait`` ends when every pod is Ready, and Ready means that state crossed."""
    release.install(*A)
    assert len(ready(release, "router")) == 1
    assert len(ready(release, "prefill")) == 2
    assert len(ready(release, "decode")) == 2
    answer = httpx.get(f"{release.url()}/ready", trust_env=False).json()
    assert answer["ready"], answer


def test_a_completion_streams_through_the_service(url: str) -> None:
    assert complete(url, max_tokens=32)


def test_helm_test_proves_every_pair(release: Release, url: str) -> None:
    def all_paired() -> bool:
        return len(httpx.get(f"{url}/ready", trust_env=False).json()["pairs"]) == 4

    release.wait(all_paired, "four pairs")
    said = release.helm("test", NAME, "--logs", "--timeout", "3m")
    assert said.count("digests equal") == 4, said
    assert "ok   completion" in said, said


def test_pods_run_restricted(release: Release) -> None:
    (pod, *_) = release.pods("decode")
    assert release.kubectl("exec", pod.name, "--", "id", "-u").strip() == "1000"
    with pytest.raises(AssertionError, match="Read-only file system"):
        release.kubectl("exec", pod.name, "--", "touch", "/opt/sluice/x")
    status = release.kubectl(
        "exec", pod.name, "--", "grep", "-E", "CapEff|Seccomp:", "/proc/1/status"
    )
    assert "CapEff:\t0000000000000000" in status
    assert "Seccomp:\t2" in status


@pytest.mark.parametrize(
    ("user", "effective"), [(1000, "0000000000000000"), (0, "0000000000004000")]
)
def test_ipc_lock_reaches_user_0_alone(release: Release, user: int, effective: str) -> None:
    """Why `rdma.asRoot` exists, and why preflight asks the kernel and not the manifest."""
    name = f"lock-{user}"
    security = {
        "runAsUser": user,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
    }
    container = {
        "name": name,
        "image": "localhost/sluice:test",
        "imagePullPolicy": "Never",
        "command": ["grep", "CapEff", "/proc/self/status"],
        "securityContext": security,
    }
    spec = json.dumps({"spec": {"containers": [container]}})
    words = ("run", name, "--image=localhost/sluice:test", "--restart=Never", f"--overrides={spec}")
    release.kubectl(*words)
    try:
        release.wait(lambda: "CapEff" in release.kubectl("logs", name), "its word", 60.0)
        assert release.kubectl("logs", name).split() == ["CapEff:", effective]
    finally:
        release.kubectl("delete", "pod", name, "--wait=false")


def test_accounts_may_read_pods_and_nothing_else(release: Release) -> None:
    account = f"--as=system:serviceaccount:models:{NAME}-sluice"
    assert release.kubectl("auth", "can-i", "watch", "pods", account).strip() == "yes"
    for verb, thing in (("get", "secrets"), ("delete", "pods"), ("create", "pods")):
        with pytest.raises(AssertionError, match=r"(?m)^no$"):
            release.kubectl("auth", "can-i", verb, thing, account)


def test_scaling_under_load_fails_no_request(release: Release, url: str) -> None:
    with Load(url).running() as load:
        for role, count in (
            ("decode", 3),
            ("decode", 1),
            ("prefill", 1),
            ("prefill", 2),
            ("decode", 2),
        ):
            release.kubectl("scale", f"deployment/{NAME}-sluice-{role}", f"--replicas={count}")
            release.wait(
                lambda r=role, n=count: len(release.pods(r)) == n == len(ready(release, r)), role
            )
    assert not load.errors
    assert load.done > 10


@pytest.mark.parametrize(
    ("old", "new", "settings"),
    [("a", "b", B), ("b", "c", C + NO_SPARE)],
    ids=["one pod more", "one pod fewer"],
)
def test_an_upgrade_to_another_layout_under_load_fails_no_request(
    release: Release, url: str, old: str, new: str, settings: tuple[str, ...]
) -> None:
    """Old and new pods refuse each other; both kinds serve until the old one is gone. No pair ever crosses."""
    seen: set[tuple[str, str]] = set()
    over = threading.Event()

    def watch_pairs() -> None:
        while not over.wait(0.5):
            try:
                pairs = httpx.get(f"{url}/ready", trust_env=False).json()["pairs"]
                layouts = {pod.ip: pod.layout for pod in release.pods()}
            except (httpx.HTTPError, AssertionError):
                continue
            for pair in pairs:
                ends = [layouts.get(pair[role].split(":")[0]) for role in ("prefill", "decode")]
                if None not in ends:
                    seen.add((str(ends[0]), str(ends[1])))

    watcher = threading.Thread(target=watch_pairs)
    watcher.start()
    try:
        with Load(url).running() as load:
            release.upgrade(*settings)
            release.wait(
                lambda: {pod.layout for pod in release.pods()} == {new},
                "only pods of the new layout",
            )
    finally:
        over.set()
        watcher.join()
    assert not load.errors
    assert load.done > 10
    assert seen == {(old, old), (new, new)}


def test_an_upgrade_of_one_role_alone_stops_and_breaks_nothing(release: Release, url: str) -> None:
    """Its new pod is refused by every prefill pod, so it never becomes Ready and no old pod goes."""
    before = {pod.name for pod in ready(release, "decode")}
    with Load(url).running() as load:
        with pytest.raises(AssertionError, match=r"deadline exceeded|timed out"):
            release.upgrade(*C, "decode.settings.page_tokens=128", timeout="45s")
        (new,) = [pod for pod in release.pods("decode") if pod.name not in before]
        said = ("logs", new.name, "-c", "decode")
        release.wait(lambda: release.kubectl(*said).count("refused") >= 2, "two refusals")
        assert "page_tokens" in release.kubectl(*said)
        assert {pod.name for pod in ready(release, "decode")} == before
        release.upgrade(*C)
    assert not load.errors
    assert load.done > 10


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_container_killed_comes_back(release: Release, url: str, role: str) -> None:
    """SIGKILL of the process itself. Requests that ran on it may fail; later ones don't."""
    before = sum(pod.restarts for pod in release.pods(role))
    victim = next(
        process
        for process in psutil.process_iter(["cmdline"])
        if f"services.{role}" in (process.info["cmdline"] or ())
    )
    victim.send_signal(signal.SIGKILL)
    for _ in range(5):
        assert complete(url)
    release.wait(lambda: sum(pod.restarts for pod in release.pods(role)) > before, "a restart")
    release.wait(lambda: len(ready(release, role)) == 2, "ready again")
    assert complete(url)


def test_deleting_a_decode_pod_finishes_its_streams(release: Release, url: str) -> None:
    with Load(url, clients=4, max_tokens=64).running() as load:
        release.wait(lambda: load.done > 0, "streams")
        (victim, *_) = ready(release, "decode")
        release.kubectl("delete", "pod", victim.name, "--wait=true", "--timeout=180s")
    assert not load.errors
    release.wait(lambda: len(ready(release, "decode")) == 2, "a new pod")


def test_rollback_under_load_fails_no_request(release: Release, url: str) -> None:
    with Load(url).running() as load:
        release.helm("rollback", NAME, "1", "--wait", "--timeout", "8m")
        release.wait(lambda: {pod.layout for pod in release.pods()} == {"a"}, "only old pods")
    assert not load.errors
    assert complete(url)


def test_mutual_tls_is_turned_on_and_certificates_rotate(
    release: Release, url: str, tmp_path: Path
) -> None:
    """With Secrets as cert-manager would write them. Replaced ones count without a restart of any pod."""
    certificates = Certificates(release, tmp_path)
    certificates.issue()
    release.upgrade("common.labels.layout=tls", *certificates.settings)
    release.wait(lambda: {pod.layout for pod in release.pods()} == {"tls"}, "only pods with TLS")
    assert complete(url)
    prefill = f"{ready(release, 'prefill')[0].ip}:7100"
    with pytest.raises(PeerLost, match="may want TLS"):
        certificates.handshake(prefill, None)
    with pytest.raises(WrongRole):
        certificates.handshake(prefill, PeerRole.ROUTER)

    pods, old = {pod.name for pod in release.pods()}, certificates.served(prefill)
    certificates.issue()
    release.wait(lambda: certificates.served(prefill) != old, "the new certificate")
    assert release.helm("test", NAME, "--logs", "--timeout", "3m").count("digests equal") == 4
    assert complete(url)
    assert {pod.name for pod in release.pods()} == pods
    assert not any(pod.restarts for pod in release.pods())


def test_uninstall_leaves_nothing(release: Release) -> None:
    release.helm("uninstall", NAME, "--wait", "--cascade=foreground", "--timeout=5m")
    kinds = (
        "pods,deployments,replicasets,services,serviceaccounts,roles,rolebindings,networkpolicies"
    )
    release.kubectl(
        "delete", "pod", f"{NAME}-sluice-test", "--ignore-not-found"
    )  # helm keeps test pods
    left = release.kubectl("get", kinds, "-l", f"app.kubernetes.io/instance={NAME}", "-o", "name")
    assert left == ""
    assert not [
        p
        for p in psutil.process_iter(["cmdline"])
        if "services." in " ".join(p.info["cmdline"] or ())
    ]
