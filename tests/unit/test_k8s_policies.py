"""The rendered Kubernetes resources keep to every policy, and each policy catches what breaks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inference_service.rpc.lifecycle import API
from tests.unit import k8s_policies as policies
from tests.unit.k8s_manifests import POOL, PRODUCT, Cluster, Workload

Mutation = Callable[[Cluster], Any]


@pytest.mark.parametrize("policy", policies.POLICIES, ids=lambda policy: policy.__name__)
def test_policy_holds(policy: policies.Policy) -> None:
    assert list(policy(Cluster())) == []


def spec(cluster: Cluster, kind: str = "Deployment", name: str = "inference-h100") -> Any:
    return cluster.find(kind, name)["spec"]


def server(cluster: Cluster) -> Any:
    """The server's container of a pool."""
    return Workload(cluster.find("Deployment", "inference-h100")).container("server")


def pod(cluster: Cluster, name: str = "inference-h100") -> Any:
    return spec(cluster, "Deployment" if name.startswith("inference") else "Job", name)["template"]["spec"]


def argue(text: str) -> Mutation:
    """Give the server one more argument."""
    return lambda cluster: server(cluster)["args"].append(text)


def configure(old: str, new: str) -> Mutation:
    """Change the configuration of a pool."""

    def change(cluster: Cluster) -> None:
        data = cluster.pools["h100"].one("ConfigMap")["data"]
        assert old in data["config.yaml"]
        data["config.yaml"] = data["config.yaml"].replace(old, new)

    return change


def locust(cluster: Cluster, job: str) -> Any:
    return Workload(cluster.find("Job", job)).container("locust")


def reword(job: str, old: str, new: str) -> Mutation:
    """Change a word of Locust's command."""

    def change(cluster: Cluster) -> None:
        words = locust(cluster, job)["command"]
        words[words.index(old)] = new

    return change


def all_sidecars(cluster: Cluster) -> None:
    for container in pod(cluster, "compare")["initContainers"]:
        container["restartPolicy"] = "Always"


CAUGHT: list[tuple[policies.Policy, str, Mutation]] = [
    (policies.selectors_match, "a Service for nobody", lambda c: spec(c, "Service")["selector"].update({POOL: "h101"})),
    (policies.selectors_match, "a Service for all pools", lambda c: spec(c, "Service")["selector"].pop(POOL)),
    (policies.selectors_match, "a budget for all", lambda c: spec(c, "PodDisruptionBudget")["selector"]["matchLabels"].pop(POOL)),
    (policies.selectors_match, "metrics of nobody", lambda c: spec(c, "PodMonitor", "inference")["selector"]["matchLabels"].update(a="b")),
    (policies.names_resolve, "another file", lambda c: pod(c)["volumes"][0]["configMap"].update(name="inference-config")),
    (policies.names_resolve, "another cache", lambda c: pod(c)["volumes"][2]["persistentVolumeClaim"].update(claimName="kernel-cache")),
    (policies.names_resolve, "KEDA's target", lambda c: spec(c, "ScaledObject")["scaleTargetRef"].update(name="inference")),
    (policies.names_resolve, "the master", reword("loadtest-workers", "--master-host=loadtest-master", "--master-host=a")),
    (policies.grace_suffices, "no grace", lambda c: pod(c).update(terminationGracePeriodSeconds=30)),
    (policies.grace_suffices, "a longer drain", argue("--set=server.drain_s=600")),
    (policies.grace_suffices, "a longer preStop", lambda c: server(c)["lifecycle"]["preStop"]["sleep"].update(seconds=120)),
    (policies.grace_suffices, "no propagation", argue("--set=server.drain_propagation_s=1")),
    (policies.probes_fit, "another service", lambda c: server(c)["readinessProbe"]["grpc"].update(service="inference.v1.Inference")),
    (policies.probes_fit, "readiness as liveness", lambda c: server(c)["livenessProbe"]["grpc"].update(service=API)),
    (policies.probes_fit, "another port", lambda c: server(c)["startupProbe"]["grpc"].update(port=50051)),
    (policies.probes_fit, "no time to start", lambda c: server(c)["startupProbe"].update(failureThreshold=2000)),
    (policies.ports_agree, "another port of the server", argue("--set=server.port=50055")),
    (policies.ports_agree, "another port of metrics", argue("--set=telemetry.metrics_port=9090")),
    (policies.ports_agree, "loopback", argue("--set=server.host=127.0.0.1")),
    (policies.ports_agree, "the Service's port", lambda c: spec(c, "Service")["ports"][0].update(port=443)),
    (policies.ports_agree, "a closed network", lambda c: spec(c, "NetworkPolicy", "inference")["ingress"].pop()),
    (policies.pools_are_disjoint, "the nodes of another", lambda c: pod(c)["nodeSelector"].update({PRODUCT: "NVIDIA-H200"})),
    (policies.pools_are_disjoint, "a name twice", lambda c: c.pools["h100"].one("Service")["metadata"].update(name="inference-h200")),
    (
        policies.pools_are_disjoint,
        "the queue of all",
        lambda c: spec(c, "ScaledObject")["triggers"][0]["metadata"].update(query="sum(inference_queue_requests)"),
    ),
    (policies.configs_load, "an unknown key", configure("page_size", "pagesize")),
    (policies.configs_load, "an unknown argument", argue("--sets=server.port=1")),
    (policies.models_fit, "larger weights", argue("--set=model.dtype=float32")),
    (policies.models_fit, "no room for a context", argue("--set=cache.gpu_memory_fraction=0.77")),
    (policies.models_fit, "another architecture", configure("sm_90", "sm_80")),
    (policies.models_fit, "a kernel of another", configure("attention_prefill: fa3", "attention_prefill: trtllm-gen")),
    (policies.models_fit, "a kernel that is not there", configure("attention_prefill: fa3", "attention_prefill: fa4")),
    (policies.kernel_caches_are_keyed, "no key", lambda c: server(c)["env"][3].update(value="/var/cache/kernels")),
    (policies.kernel_caches_are_keyed, "another version", lambda c: server(c)["env"][1].update(value="0.6.12")),
    (policies.kernel_caches_are_keyed, "no volume", lambda c: server(c)["volumeMounts"].pop(2)),
    (policies.kernel_caches_are_keyed, "another pool", lambda c: pod(c, "compare")["nodeSelector"].update({PRODUCT: "NVIDIA-B200"})),
    (policies.resources_are_bounded, "no limit", lambda c: server(c)["resources"]["limits"].pop("memory")),
    (policies.resources_are_bounded, "an endless volume", lambda c: pod(c)["volumes"][-1].update(emptyDir={})),
    (policies.resources_are_bounded, "more processes", reword("loadtest-workers", "--processes=4", "--processes=8")),
    (policies.resources_are_bounded, "more workers", lambda c: spec(c, "Job", "loadtest-workers").update(parallelism=3)),
    (policies.images_are_pinned, "latest", lambda c: server(c).update(image="registry.example.com/inference-service:latest")),
    (policies.images_are_pinned, "no tag", lambda c: server(c).update(image="registry.example.com/inference-service")),
    (policies.images_are_pinned, "another version", lambda c: server(c).update(image="registry.example.com/inference-service:0.0.9")),
    (policies.pods_are_confined, "root", lambda c: pod(c)["securityContext"].update(runAsNonRoot=False)),
    (policies.pods_are_confined, "a token", lambda c: pod(c).pop("automountServiceAccountToken")),
    (policies.pods_are_confined, "no seccomp", lambda c: pod(c)["securityContext"].pop("seccompProfile")),
    (policies.pods_are_confined, "capabilities", lambda c: server(c)["securityContext"].pop("capabilities")),
    (policies.pods_are_confined, "a writable root", lambda c: server(c)["securityContext"].update(readOnlyRootFilesystem=False)),
    (policies.pods_are_confined, "the node's files", lambda c: pod(c)["volumes"].append({"name": "h", "hostPath": {"path": "/"}})),
    (policies.rollouts_get_on, "a surge", lambda c: spec(c)["strategy"]["rollingUpdate"].update(maxSurge=1, maxUnavailable=0)),
    (policies.rollouts_get_on, "the defaults", lambda c: spec(c).update(strategy={"type": "RollingUpdate"})),
    (policies.rollouts_get_on, "a strict budget", lambda c: spec(c, "PodDisruptionBudget").update(minAvailable=1)),
    (policies.rollouts_get_on, "replicas", lambda c: spec(c).update(replicas=2)),
    (policies.rollouts_get_on, "one replica", lambda c: spec(c, "ScaledObject").update(minReplicaCount=1)),
    (policies.rollouts_get_on, "a strict spread", lambda c: pod(c)["topologySpreadConstraints"][0].update(whenUnsatisfiable="no")),
    (policies.gpus_are_asked_for_once, "two GPUs", lambda c: server(c)["resources"]["limits"].update({"nvidia.com/gpu": 2})),
    (policies.gpus_are_asked_for_once, "servers as sidecars", all_sidecars),
    (policies.gpus_are_asked_for_once, "no toleration", lambda c: pod(c).pop("tolerations")),
    (policies.gpus_are_asked_for_once, "load from a GPU node", lambda c: pod(c, "loadtest-workers").pop("affinity")),
    (policies.comparison_is_complete, "all at once", lambda c: spec(c, "Job", "compare").update(parallelism=3)),
    (policies.comparison_is_complete, "another order", lambda c: locust(c, "compare")["command"].reverse()),
    (policies.comparison_is_complete, "an index too few", lambda c: spec(c, "Job", "compare").update(completions=2)),
]


@pytest.mark.parametrize(
    ("policy", "mutation"), [pytest.param(policy, mutation, id=f"{policy.__name__}-{what}") for policy, what, mutation in CAUGHT]
)
def test_policy_catches(policy: policies.Policy, mutation: Mutation) -> None:
    cluster = Cluster()
    mutation(cluster)
    assert list(policy(cluster)) != []


def test_each_policy_has_a_mutation() -> None:
    assert {policy for policy, _, _ in CAUGHT} == set(policies.POLICIES)
