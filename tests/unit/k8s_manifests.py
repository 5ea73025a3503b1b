"""The rendered Kubernetes resources as the policies read them, and the little arithmetic that Kubernetes does with them."""

from __future__ import annotations

import pickle
import re
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import yaml

from inference_service.cli import _parser
from inference_service.config import Config, load_config

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
POOL = "inference-service/pool"
GPU = "nvidia.com/gpu"
PRODUCT = "nvidia.com/gpu.product"

Resource: TypeAlias = dict[str, Any]


def _versions() -> dict[str, str]:
    """What the image for GPUs has, as its Dockerfile and the constraints say."""
    dockerfile = (K8S / "docker" / "Dockerfile").read_text()
    pins = (ROOT / ".ci" / "constraints.txt").read_text()
    found = {
        "cuda": re.search(r"FROM nvidia/cuda:(\d+\.\d+)", dockerfile),
        "flashinfer": re.search(r"flashinfer-python==([\d.]+)", dockerfile),
        "triton": re.search(r"^triton==([\d.]+)", pins, re.MULTILINE),
    }
    return {package: match[1] for package, match in found.items() if match}


VERSIONS = _versions()


def read(text: str) -> list[Resource]:
    """The resources of a rendered overlay."""
    return [resource for resource in yaml.load_all(text, yaml.CSafeLoader) if resource]


@cache
def _rendered() -> bytes:
    """All overlays by name, pickled: each test gets its own quickly."""
    return pickle.dumps({file.stem: read(file.read_text()) for file in sorted((K8S / "rendered").glob("*.yaml"))})


class Cluster:
    """All that the overlays bring, together. Policies may change it: each has its own."""

    def __init__(self) -> None:
        self.overlays: dict[str, list[Resource]] = pickle.loads(_rendered())

    @property
    def resources(self) -> list[Resource]:
        return [resource for overlay in self.overlays.values() for resource in overlay]

    def of(self, *kinds: str) -> list[Resource]:
        return [resource for resource in self.resources if resource["kind"] in kinds]

    def find(self, kind: str, name: str) -> Resource:
        """Raises KeyError."""
        for resource in self.of(kind):
            if resource["metadata"]["name"] == name:
                return resource
        raise KeyError(f"{kind} {name}")

    @property
    def workloads(self) -> list[Workload]:
        return [Workload(resource) for resource in self.of("Deployment", "Job")]

    @property
    def pools(self) -> dict[str, Pool]:
        """By name."""
        return {
            name.removeprefix("pools-"): Pool(name.removeprefix("pools-"), resources)
            for name, resources in self.overlays.items()
            if name.startswith("pools-")
        }


class Workload:
    """A Deployment or Job."""

    def __init__(self, resource: Resource) -> None:
        self.resource = resource
        self.name: str = resource["metadata"]["name"]
        self.template = resource["spec"]["template"]
        self.labels: dict[str, str] = self.template["metadata"]["labels"]
        self.pod = self.template["spec"]

    @property
    def containers(self) -> list[Resource]:
        return [*self.pod.get("initContainers", []), *self.pod["containers"]]

    def container(self, name: str) -> Resource:
        return next(container for container in self.containers if container["name"] == name)

    @property
    def gpus(self) -> int:
        """What the scheduler reckons with: the largest of what an init container needs beside the sidecars before it, and what the
        containers need beside all sidecars."""
        sidecars, largest = 0, 0
        for container in self.pod.get("initContainers", []):
            if container.get("restartPolicy") == "Always":
                sidecars += gpus(container)
            else:
                largest = max(largest, sidecars + gpus(container))
        return max(largest, sidecars + sum(map(gpus, self.pod["containers"])))


class Pool:
    """The overlay of a GPU: its Deployment, what belongs to it, and its configuration as the server reads it."""

    def __init__(self, name: str, resources: list[Resource]) -> None:
        self.name, self.resources = name, resources

    def one(self, kind: str) -> Resource:
        (found,) = (resource for resource in self.resources if resource["kind"] == kind)
        return found

    @property
    def workload(self) -> Workload:
        return Workload(self.one("Deployment"))

    @cached_property
    def config(self) -> Config:
        """The ConfigMap's file with the arguments of the server's container. Raises ConfigError, or SystemExit for wrong arguments."""
        arguments = _parser().parse_args(self.workload.container("server")["args"])
        return parse(self.one("ConfigMap")["data"][Path(arguments.config).name], arguments.set)


def parse(text: str, settings: list[str] | None = None) -> Config:
    """A configuration file, as the real parser reads it. Raises ConfigError."""
    with TemporaryDirectory() as directory:
        file = Path(directory) / "config.yaml"
        file.write_text(text)
        return load_config(file, settings)


def gpus(container: Resource) -> int:
    return int(container["resources"]["limits"].get(GPU, 0))


def cores(quantity: str | float) -> float:
    """CPU in cores."""
    text = str(quantity)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def environment(container: Resource) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container.get("env", [])}


def option(command: list[str], name: str) -> str:
    """The value of --name=VALUE. Raises KeyError."""
    for word in command:
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
    raise KeyError(name)


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()
