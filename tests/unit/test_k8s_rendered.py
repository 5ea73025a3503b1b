"""What is kept in k8s/rendered is what kustomize makes of the overlays, and what Kubernetes and its operators take."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from inference_service.telemetry import names
from k8s.render import OBSERVABILITY, overlays, prometheus_rule, render, rendered_file
from tests.unit.k8s_manifests import K8S, Cluster, read

CRDS = Path(__file__).parent / "crds"
VERSIONS = ("1.30", "1.33", "1.35", "1.37")
"""1.30 is the first with sidecars and a preStop that sleeps."""
CUSTOM = ("keda.sh/", "monitoring.coreos.com/")


def test_each_overlay_is_kept() -> None:
    assert {rendered_file(overlay) for overlay in overlays()} == set((K8S / "rendered").glob("*.yaml"))


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not here")
@pytest.mark.parametrize("overlay", overlays(), ids=lambda overlay: rendered_file(overlay).stem)
def test_what_is_kept_is_what_kustomize_makes(overlay: Path) -> None:
    """By content, since versions of kustomize differ in the order of what they write."""
    if overlay == OBSERVABILITY and not (OBSERVABILITY / "alerts.yaml").exists():
        pytest.skip("there are no alerts yet")
    made, kept = read(render(overlay)), read(rendered_file(overlay).read_text())
    assert sorted(made, key=_key) == sorted(kept, key=_key), "run `python k8s/render.py`"


def _key(resource: dict[str, Any]) -> tuple[str, str]:
    return resource["kind"], resource["metadata"]["name"]


@pytest.mark.skipif(not (OBSERVABILITY / "alerts.yaml").exists(), reason="there are no alerts yet")
def test_the_operator_has_the_alerts() -> None:
    assert (OBSERVABILITY / "prometheusrule.yaml").read_text() == prometheus_rule(), "run `python k8s/render.py`"


def test_the_collector_samples_by_attributes_that_spans_have() -> None:
    attributes = set(re.findall(r'attributes\["([^"]+)"\]', (OBSERVABILITY / "collector.yaml").read_text()))
    assert attributes and all(attribute in vars(names).values() for attribute in attributes)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_it(version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for resource in Cluster().resources:
        if not resource["apiVersion"].startswith(CUSTOM):
            kubernetes_validate.validate(resource, version, strict=True)


def test_kubernetes_refuses_unknown_fields() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    resource = deepcopy(Cluster().find("Deployment", "inference-h100"))
    resource["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(resource, VERSIONS[-1], strict=True)


def validate_custom(resources: list[dict[str, Any]]) -> list[str]:
    """What the schemas of the operators refuse."""
    if not shutil.which("node") or not (CRDS / "node_modules").exists():
        pytest.skip("node, or the schemas of tests/unit/crds, are not here: `make test` installs them where there is npm")
    run = subprocess.run(["node", CRDS / "validate.mjs"], input=json.dumps(resources), capture_output=True, text=True, timeout=60)
    assert run.returncode == len(run.stdout.splitlines()), run.stderr
    return run.stdout.splitlines()


def test_operators_take_it() -> None:
    resources = [resource for resource in Cluster().resources if resource["apiVersion"].startswith(CUSTOM)]
    assert {resource["kind"] for resource in resources} == {"PodMonitor", "PrometheusRule", "ScaledObject"}
    assert validate_custom(resources) == []


def test_operators_refuse_what_is_wrong() -> None:
    cluster = Cluster()
    scaled, monitor = cluster.find("ScaledObject", "inference-h100"), cluster.find("PodMonitor", "inference")
    scaled["spec"]["maxReplicaCount"] = "8"
    del monitor["spec"]["selector"]
    assert len(validate_custom([scaled, monitor])) == 2
