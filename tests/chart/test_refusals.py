"""Values that can't work are refused before anything is installed, in words that say what to change."""

from __future__ import annotations

import pytest

from tests.chart.helm import Helm, HelmFailed

CONTRADICTIONS = {
    "model: {source: pvc}": "model.pvc.claimName is empty",
    "model: {source: hostPath}": "model.hostPath is empty",
    "model: {source: download, download: {image: a}}": "model.download.image or .command is empty",
    "discovery: {kind: static}": "discovery.decodes or discovery.prefills is empty",
    "tls: {enabled: true, secrets: {router: a}}": "tls.secrets needs a Secret for router, prefill, decode and operator",
    "tls: {enabled: true, certManager: {enabled: true}}": "issuerRef.name is empty",
    "tls: {certManager: {enabled: true}}": "tls.enabled is false",
    "imex: {enabled: true, create: false}": "imex.claimTemplate is empty",
    "nixl: {ports: {from: 5, to: 5}}": "The range must go upwards",
    "inferencePool: {enabled: true}": "endpointPicker.name is empty",
    "httpRoute: {enabled: true}": "httpRoute.parentRefs is empty",
    "ingress: {enabled: true}": "ingress.hosts is empty",
    "metrics: {enabled: false, podMonitor: {enabled: true}}": "there would be nothing to scrape",
    "{metrics: {podMonitor: {enabled: true}}, auth: {secret: keys}}": "auth.clientSecret is empty",
    "serviceAccount: {create: false}": "serviceAccount.name is empty",
    'minimumKubernetes: "1.99"': "the chart needs 1.99 or newer",
    "decode: {drain: {graceSeconds: 20}}": "decode.drain.graceSeconds is 20, less than preStopSeconds + seconds = 35",
    "prefill: {autoscaling: {kind: hpa, minReplicas: 9}}": "minReplicas is 9, more than maxReplicas 4",
    "{metrics: {enabled: false}, decode: {autoscaling: {kind: keda}}}": "metrics.enabled is false",
    "{metrics: {enabled: false}, decode: {probes: {kind: http}}}": "decode.probes.kind is http",
    "router: {multinode: {enabled: true}}": "a router is one process",
    "router: {gpu: {count: 1}}": "the router computes nothing",
    "{engine: {device: cpu}, decode: {gpu: {count: 1}}}": "GPUs would be held and not used",
    "decode: {gpu: {count: 2}}": "decode.gpu.count is 2, but its engine has 1 ranks",
    "prefill: {rdma: {asRoot: true}}": "nothing needs root",
}
BREAKS_OF_SCHEMA = {
    "replica: 3": "replica",
    "decode: {replicas: two}": "replicas",
    "decode: {replicas: -1}": "replicas",
    "decode: {settings: {page_token: 64}}": "page_token",
    "engine: {pool_mode: pagged}": "pool_mode",
    "engine: {model_dir: /x}": "model_dir",
    "engine: {fault_withhold: SWA}": "fault_withhold",
    "common: {settings: {log_level: info}}": "settings",
    "router: {port: 70000}": "port",
    "decode: {probes: {kind: tcp}}": "kind",
    "image: {digest: latest}": "digest",
    "model: {source: s3}": "source",
    "model: {path: /absolute}": "path",
    "model: {hostPath: relative}": "hostPath",
    "decode: {multinode: {size: 1}}": "size",
    "decode: {shm: {size: plenty}}": "size",
    "discovery: {decodes: [no-port]}": "decodes",
    "decode: {env: [{value: x}]}": "env",
    "decode: {autoscaling: {kind: vpa}}": "kind",
    "prefill: {strategy: {rollingUpdate: {maxSurge: -1}}}": "maxSurge",
    "tls: {certmanager: {}}": "certmanager",
}


@pytest.mark.parametrize("values", CONTRADICTIONS)
def test_contradicting_values_are_refused(helm4: Helm, values: str) -> None:
    with pytest.raises(HelmFailed, match="These values can't work") as failure:
        helm4.template(values=values, show_only="templates/workloads.yaml")
    assert CONTRADICTIONS[values] in str(failure.value)


@pytest.mark.parametrize("values", BREAKS_OF_SCHEMA)
def test_misspelt_and_impossible_values_are_refused(helm4: Helm, values: str) -> None:
    with pytest.raises(HelmFailed, match="schema") as failure:
        helm4.template(values=values)
    assert BREAKS_OF_SCHEMA[values] in str(failure.value)


def test_every_contradiction_is_told_at_once(helm: Helm) -> None:
    values = (
        "{"
        + ", ".join(
            ["model: {source: pvc}", "ingress: {enabled: true}", "router: {gpu: {count: 1}}"]
        )
        + "}"
    )
    with pytest.raises(HelmFailed) as failure:
        helm.template(values=values)
    assert str(failure.value).count("\n  - ") == 3


def test_presets_ask_for_the_model(helm4: Helm) -> None:
    from tests.chart.helm import CHART

    for preset in ("hgx-b200", "gb200-nvl72"):
        with pytest.raises(HelmFailed, match=r"model\.pvc\.claimName is empty"):
            helm4.template(CHART / f"values-{preset}.yaml")
