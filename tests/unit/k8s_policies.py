"""What must hold of the Kubernetes resources beyond their schemas. Each policy yields one line for each breach."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace as replace_dataclass
from itertools import combinations
from pathlib import Path
from typing import TypeAlias

import torch
import yaml
from msgspec.structs import asdict, replace

from inference_service import __version__
from inference_service.config import Config, ConfigError
from inference_service.execution.device import TargetDevice, find_setting
from inference_service.fetch import resolve_model
from inference_service.kernels.support import rows
from inference_service.models.config import DTYPES
from inference_service.models.families import read_config
from inference_service.rpc.lifecycle import API, CUT_OFF_S, LIVENESS
from inference_service.rpc.server import STOP_S
from inference_service.size import GPUS, estimate
from tests.unit.k8s_manifests import POOL, PRODUCT, VERSIONS, Cluster, Resource, Workload, cores, environment, gpus, option, parse, selects

Policy: TypeAlias = Callable[[Cluster], Iterator[str]]
LEAST_SLACK_S = 5
"""For the engine to end, after the last stream."""


def selectors_match(cluster: Cluster) -> Iterator[str]:
    """Whatever selects pods selects some, and what belongs to a pool its own alone."""
    labels = {workload.name: workload.labels for workload in cluster.workloads}
    for resource in cluster.of("Service", "PodDisruptionBudget", "PodMonitor", "NetworkPolicy", "Deployment"):
        name, selector = resource["metadata"]["name"], resource["spec"].get("selector") or resource["spec"]["podSelector"]
        selector = selector.get("matchLabels", {} if resource["kind"] == "NetworkPolicy" else selector)
        found = {workload for workload, its in labels.items() if selects(selector, its)}
        pool = resource["metadata"].get("labels", {}).get(POOL)
        if not found:
            yield f"{resource['kind']} {name} selects no pod"
        elif pool and found != {f"inference-{pool}"}:
            yield f"{resource['kind']} {name} selects pods of {', '.join(sorted(found))}"


def names_resolve(cluster: Cluster) -> Iterator[str]:
    """Volumes, scaling and addresses name what there is."""
    there = {(resource["kind"], resource["metadata"]["name"]) for resource in cluster.resources}
    wanted: list[tuple[str, str]] = []
    for workload in cluster.workloads:
        for volume in workload.pod["volumes"]:
            if "configMap" in volume:
                wanted.append(("ConfigMap", volume["configMap"]["name"]))
            if "persistentVolumeClaim" in volume:
                wanted.append(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        for container in workload.containers:
            if endpoint := environment(container).get("OTEL_EXPORTER_OTLP_ENDPOINT"):
                wanted.append(("Service", endpoint.removeprefix("http://").partition(":")[0]))
    for scaled in cluster.of("ScaledObject"):
        wanted.append(("Deployment", scaled["spec"]["scaleTargetRef"]["name"]))
    wanted.append(("Service", option(_locust(cluster, "loadtest-workers"), "master-host")))
    for kind, name in wanted:
        if (kind, name) not in there:
            yield f"there is no {kind} {name}"


def grace_suffices(cluster: Cluster) -> Iterator[str]:
    """A pod has time for all that its end consists of."""
    for pool in cluster.pools.values():
        server = pool.config.server
        wait_s = pool.workload.container("server")["lifecycle"]["preStop"]["sleep"]["seconds"]
        needed_s = wait_s + server.drain_propagation_s + server.drain_s + CUT_OFF_S + STOP_S + LEAST_SLACK_S
        if (grace_s := pool.workload.pod["terminationGracePeriodSeconds"]) < needed_s:
            yield f"{pool.name}: terminationGracePeriodSeconds is {grace_s}, but preStop, drain and stop take {needed_s:g}"
        readiness = pool.workload.container("server")["readinessProbe"]
        if server.drain_propagation_s < (noticed_s := readiness["periodSeconds"] * readiness["failureThreshold"]):
            yield f"{pool.name}: a drain refuses requests before the {noticed_s} s that readiness takes to say so"


def probes_fit(cluster: Cluster) -> Iterator[str]:
    """Probes ask the port of health for a name that the server answers to, and a start has the time that it may take."""
    wanted = {"startupProbe": API, "readinessProbe": API, "livenessProbe": LIVENESS}
    for pool in cluster.pools.values():
        container = pool.workload.container("server")
        for probe, service in wanted.items():
            grpc = container[probe]["grpc"]
            if grpc["port"] != pool.config.server.health_port:
                yield f"{pool.name}: {probe} asks port {grpc['port']}, but health_port is {pool.config.server.health_port}"
            if grpc.get("service", "") != service:
                yield f"{pool.name}: {probe} asks for {grpc.get('service', '')!r}, not {service!r}"
        startup = container["startupProbe"]
        start_s = startup["periodSeconds"] * startup["failureThreshold"]
        if pool.workload.resource["spec"]["progressDeadlineSeconds"] <= start_s:
            yield f"{pool.name}: a rollout is given up before a start of {start_s} s"


def ports_agree(cluster: Cluster) -> Iterator[str]:
    """A port has one number: in the configuration, the containers, the Services, the network policies and the clients' addresses."""
    for pool in cluster.pools.values():
        server, metrics = pool.config.server, pool.config.telemetry.metrics_port
        ports = {port["name"]: port["containerPort"] for port in pool.workload.container("server")["ports"]}
        expected = {"grpc": Config().server.port, "health": server.health_port, "metrics": metrics}
        if ports != expected or server.port != Config().server.port:
            yield f"{pool.name}: ports {ports} of the container, but {expected} of the server"
        (service,) = pool.one("Service")["spec"]["ports"]
        if (service["port"], service["targetPort"]) != (server.port, "grpc"):
            yield f"{pool.name}: the Service has port {service['port']} to {service['targetPort']}"
        if server.host != "0.0.0.0":
            yield f"{pool.name}: server.host {server.host} is not reached from outside"
        open_to = _open_ports(cluster, "inference")
        if open_to != {server.port, metrics}:
            yield f"{pool.name}: the network policy opens {sorted(open_to)}, but the server has {server.port} and {metrics}"
    target = yaml.safe_load(_data(cluster, "loadtest-config", "config.yaml"))["loadtest"]["target"]
    host, port = re.fullmatch(r"grpc://([\w-]+):(\d+)", target).groups()  # type: ignore[union-attr]
    if host not in {f"inference-{pool}" for pool in cluster.pools} or int(port) != Config().server.port:
        yield f"the load test's target {target} is no pool"


def pools_are_disjoint(cluster: Cluster) -> Iterator[str]:
    """No node and no resource belongs to two pools, and each scales by its own queue."""
    for one, other in combinations(cluster.pools.values(), 2):
        if one.workload.pod["nodeSelector"][PRODUCT] == other.workload.pod["nodeSelector"][PRODUCT]:
            yield f"{one.name} and {other.name} share their nodes"
        names = [{(each["kind"], each["metadata"]["name"]) for each in pool.resources} for pool in (one, other)]
        for kind, name in names[0] & names[1]:
            yield f"{one.name} and {other.name} both have {kind} {name}"
    for pool in cluster.pools.values():
        query = pool.one("ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
        if re.findall(r'pool="([^"]*)"', query) != [pool.name]:
            yield f"{pool.name} scales by {query}"


def configs_load(cluster: Cluster) -> Iterator[str]:
    """The real parsers take the configurations and the command lines."""
    for pool in cluster.pools.values():
        try:
            assert pool.config.device.kind == "cuda"
        except (ConfigError, SystemExit, KeyError) as error:
            yield f"{pool.name}: {error}"
    for name in ("loadtest-config", "compare-config"):
        try:
            parse(_data(cluster, name, "config.yaml"))
        except ConfigError as error:
            yield f"{name}: {error}"


def models_fit(cluster: Cluster) -> Iterator[str]:
    """By `inference-service size` each pool's model fits its GPU, the file is for that GPU, and what it forces can run there."""
    for pool in cluster.pools.values():
        # The volume's directories are named as the shapes in configs/models.
        config = replace(pool.config, model=replace(pool.config.model, path=Path(pool.config.model.path).name))
        gpu = GPUS[pool.name]
        if config.device.arch != gpu.architecture:
            yield f"{pool.name}: device.arch is {config.device.arch}, but a {gpu.name} is {gpu.architecture}"
        try:
            estimate(config, gpu.memory_gib)
        except ConfigError as error:
            yield f"{pool.name}: {error}"
        shape = read_config(resolve_model(config.model.path))
        target = TargetDevice(torch.device("cuda"), gpu.name, gpu.architecture)
        setting = replace_dataclass(find_setting(config, target, shape, DTYPES[config.model.dtype]), versions=VERSIONS)
        for operator, backend in asdict(config.kernels).items():
            row = next((row for row in rows(operator) if row.backend == backend), None)
            if backend != "auto" and (refusal := row.refusal(setting) if row else f"kernels.{operator}: there is no {backend}"):
                yield f"{pool.name}: {refusal}"


def kernel_caches_are_keyed(cluster: Cluster) -> Iterator[str]:
    """Compiled kernels lie apart by GPU, FlashInfer and CUDA, and both containers look for them in one place."""
    for pool in cluster.pools.values():
        expected = {"GPU": pool.workload.pod["nodeSelector"][PRODUCT], "FLASHINFER": VERSIONS["flashinfer"], "CUDA": VERSIONS["cuda"]}
        for container in pool.workload.containers:
            found = environment(container)
            if not expected.items() <= found.items() or not all(f"$({name})" in found["HOME"] for name in expected):
                yield f"{pool.name}: {container['name']} keeps its kernels by {found}"
            if not any(found["HOME"].startswith(mount["mountPath"] + "/") for mount in container["volumeMounts"]):
                yield f"{pool.name}: {container['name']} has its home, {found['HOME']}, on no volume"
    compare = Workload(cluster.find("Job", "compare"))
    key = f"{compare.pod['nodeSelector'][PRODUCT]}/flashinfer-{VERSIONS['flashinfer']}-cuda-{VERSIONS['cuda']}"
    if not environment(compare.container("ours"))["HOME"].endswith(f"/{key}"):
        yield f"compare: our server does not find the pool's kernels in {key}"


def resources_are_bounded(cluster: Cluster) -> Iterator[str]:
    """Every container has requests and limits, equal ones, so that its cores are its own; Locust has a core for each process."""
    for workload in cluster.workloads:
        for container in workload.containers:
            requests, limits = ({**container.get("resources", {}).get(key, {})} for key in ("requests", "limits"))
            limits.pop("nvidia.com/gpu", None)
            if not {"cpu", "memory"} <= limits.keys() or requests != limits:
                yield f"{workload.name}: {container['name']} has requests {requests} and limits {limits}"
        for volume in workload.pod["volumes"]:
            if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
                yield f"{workload.name}: the volume {volume['name']} may grow without end"
    workers = cluster.find("Job", "loadtest-workers")
    processes = int(option(_locust(cluster, "loadtest-workers"), "processes"))
    if cores(Workload(workers).container("locust")["resources"]["requests"]["cpu"]) != processes:
        yield f"loadtest-workers: {processes} processes have not as many cores"
    if int(option(_locust(cluster, "loadtest-master"), "expect-workers")) != processes * workers["spec"]["parallelism"]:
        yield "loadtest-master: it expects another number of workers than there are processes"
    comparison = yaml.safe_load(_data(cluster, "compare-config", "config.yaml"))["comparison"]
    locust = Workload(cluster.find("Job", "compare")).container("locust")
    if cores(locust["resources"]["requests"]["cpu"]) != comparison["processes"]:
        yield "compare: Locust has not a core for each of comparison.processes"


def images_are_pinned(cluster: Cluster) -> Iterator[str]:
    """By digest, or by a tag that says a whole version; ours is of this version."""
    for workload in cluster.workloads:
        for container in workload.containers:
            name, _, tag = container["image"].partition("@sha256:")[0].rpartition(":")
            if "@sha256:" not in container["image"] and not re.fullmatch(r"v?\d+\.\d+\.\d+([.-]\w+)*", tag):
                yield f"{workload.name}: {container['name']} runs {container['image']}"
            if name.endswith("inference-service") and tag.removesuffix("-cpu") != __version__:
                yield f"{workload.name}: {container['name']} runs {tag}, but this is {__version__}"


def pods_are_confined(cluster: Cluster) -> Iterator[str]:
    """What the Pod Security Standard `restricted` demands, and a read-only root and no token besides."""
    for workload in cluster.workloads:
        pod, security = workload.pod, workload.pod.get("securityContext", {})
        if pod.get("automountServiceAccountToken") is not False:
            yield f"{workload.name}: has a token of its service account"
        if not security.get("runAsNonRoot") or not security.get("runAsUser"):
            yield f"{workload.name}: may run as root"
        if security.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{workload.name}: has no seccomp profile"
        if any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")) or any("hostPath" in volume for volume in pod["volumes"]):
            yield f"{workload.name}: shares what is the node's"
        for container in workload.containers:
            own = container.get("securityContext", {})
            expected = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
            if own != expected:
                yield f"{workload.name}: {container['name']} has the security context {own}"


def rollouts_get_on(cluster: Cluster) -> Iterator[str]:
    """A rollout needs no GPU beyond those that the pool has, a node can be drained, and nobody sets what KEDA sets."""
    for pool in cluster.pools.values():
        spec, scaled, budget = (pool.one(kind)["spec"] for kind in ("Deployment", "ScaledObject", "PodDisruptionBudget"))
        rolling = spec["strategy"].get("rollingUpdate", {})
        if rolling.get("maxSurge") != 0 or rolling.get("maxUnavailable", 0) < 1:
            yield f"{pool.name}: a rollout with {rolling} waits for a GPU that nobody gives back"
        if budget.get("maxUnavailable", 0) < 1 or "minAvailable" in budget:
            yield f"{pool.name}: its disruption budget {budget} may forbid to drain a node"
        if budget.get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            yield f"{pool.name}: a pod that never gets ready keeps its node from being drained"
        if "replicas" in spec:
            yield f"{pool.name}: applying it sets back the replicas that KEDA has set"
        if not rolling.get("maxUnavailable", 0) < scaled["minReplicaCount"] <= scaled["maxReplicaCount"]:
            yield f"{pool.name}: with {scaled['minReplicaCount']} replicas a rollout leaves nobody to serve"
        for constraint in spec["template"]["spec"]["topologySpreadConstraints"]:
            if constraint["whenUnsatisfiable"] != "ScheduleAnyway":
                yield f"{pool.name}: a pod may wait for a place while there are free GPUs on another node"


def gpus_are_asked_for_once(cluster: Cluster) -> Iterator[str]:
    """An engine uses one GPU, so a pod asks for one, and is let onto GPU nodes; all else stays off them."""
    for workload in cluster.workloads:
        on_gpu = PRODUCT in workload.pod.get("nodeSelector", {})
        if workload.gpus != int(on_gpu):
            yield f"{workload.name}: asks for {workload.gpus} GPUs"
        if on_gpu and not any(each.get("key") == "nvidia.com/gpu" for each in workload.pod.get("tolerations", [])):
            yield f"{workload.name}: does not tolerate the taint of GPU nodes"
        if workload.name.startswith("loadtest") and "DoesNotExist" not in str(workload.pod.get("affinity")):
            yield f"{workload.name}: may take the cores of a GPU node"
        # The GPU of an init container is handed on to the containers after it.
        if not on_gpu and any(map(gpus, workload.containers)):
            yield f"{workload.name}: asks for a GPU without saying which"


def comparison_is_complete(cluster: Cluster) -> Iterator[str]:
    """Each index has one target and one server, in one order."""
    job = Workload(cluster.find("Job", "compare"))
    targets = list(yaml.safe_load(_data(cluster, "compare-config", "config.yaml"))["comparison"]["targets"])
    spec = job.resource["spec"]
    if (spec["completionMode"], spec["completions"], spec["parallelism"]) != ("Indexed", len(targets), 1):
        yield f"compare: not one pod after the other for each of {', '.join(targets)}"
    if job.container("locust")["command"][2:] != targets or job.container("locust").get("restartPolicy") != "Always":
        yield "compare: Locust is no sidecar that knows the targets in their order"
    servers = [container for container in job.containers if "/etc/compare/serve.sh" in container["command"]]
    if [(each["name"], each["command"][2]) for each in servers] != [(name, str(index)) for index, name in enumerate(targets)]:
        yield "compare: the servers have not the targets' indexes"


def _open_ports(cluster: Cluster, policy: str) -> set[int]:
    rules = cluster.find("NetworkPolicy", policy)["spec"]["ingress"]
    return {port["port"] for rule in rules for port in rule["ports"]}


def _data(cluster: Cluster, name: str, key: str) -> str:
    """A file of a ConfigMap, whose name kustomize made longer."""
    (found,) = (each for each in cluster.of("ConfigMap") if each["metadata"]["name"].startswith(name))
    return str(found["data"][key])


def _locust(cluster: Cluster, job: str) -> list[str]:
    command: list[str] = _container(cluster.find("Job", job))["command"]
    return command


def _container(job: Resource) -> Resource:
    return Workload(job).container("locust")


POLICIES: list[Policy] = [
    selectors_match,
    names_resolve,
    grace_suffices,
    probes_fit,
    ports_agree,
    pools_are_disjoint,
    configs_load,
    models_fit,
    kernel_caches_are_keyed,
    resources_are_bounded,
    images_are_pinned,
    pods_are_confined,
    rollouts_get_on,
    gpus_are_asked_for_once,
    comparison_is_complete,
]
