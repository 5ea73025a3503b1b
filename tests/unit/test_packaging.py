"""What the project says of itself: its dependencies, its pins, and which part may import what."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import msgspec
import pytest
import yaml

from inference_service.config import Config, load_config

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"baselines", "benchmarks", "inference", "inference_service", "k8s", "loadgen", "tests"}


def name_of(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {name_of(name): version for name, version in pairs}


def imported_modules(package: str) -> set[str]:
    """Modules that the package's files import, as written."""
    modules: set[str] = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module)
    return modules


# Distributions that share a module, and what only a GPU machine has.
DISTRIBUTIONS = {
    "flashinfer": "flashinfer-python",
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "opentelemetry.exporter.otlp.proto.grpc": "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry.proto": "opentelemetry-proto",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry": "opentelemetry-api",
    "triton": "torch",
}
PEERS = {"vllm"}
"""Whose kernels are measured where they are installed."""


def distributions(package: str) -> set[str]:
    """Distributions that bring what the package's files import."""
    by_module = packages_distributions()
    found: set[str] = set()
    for module in imported_modules(package):
        top = module.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in OURS:
            by_hand = next((name for prefix, name in DISTRIBUTIONS.items() if f"{module}.".startswith(f"{prefix}.")), None)
            found.add(by_hand or name_of(by_module.get(top, [top])[0]))
    return found


@pytest.mark.parametrize(
    ("package", "extras"),
    [
        ("inference_service", ["gpu"]),
        ("loadgen", ["loadgen"]),
        ("baselines", ["loadgen", "baselines", "gpu"]),
        ("tests", ["loadgen", "dev", "gpu"]),
        ("benchmarks", ["dev", "baselines"]),
    ],
)
def test_what_is_imported_is_declared(package: str, extras: list[str]) -> None:
    requirements = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    assert distributions(package) - {name_of(line) for line in requirements} - PEERS == set()


def test_every_dependency_has_a_pin() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = {name_of(line) for line in [*PROJECT["dependencies"], *extras["baselines"], *extras["loadgen"], *extras["dev"]]}
    assert wanted - pins().keys() == set()


def test_grpc_pins_are_of_one_minor() -> None:
    minors = {name: version.rsplit(".", 1)[0] for name, version in pins().items() if name.startswith("grpcio")}
    assert len(minors) >= 5
    assert len(set(minors.values())) == 1, minors


def test_stubs_are_built_by_the_pinned_compiler() -> None:
    """Stubs refuse a runtime older than their compiler, so the build, the developers' environment and the lower bound agree."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    compiler = f"grpcio-tools=={pins()['grpcio-tools']}"
    assert compiler in build
    assert compiler in PROJECT["optional-dependencies"]["dev"]
    assert f"grpcio>={pins()['grpcio-tools']}" in PROJECT["dependencies"]


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (["rpc.server", "client", "cli", "fetch", "telemetry.tracing", "text.tokenizer"], {"torch", "transformers"}),
        (["engine.scheduler", "engine.loop", "engine.kv_pages", "engine.prefix_cache"], {"torch", "grpc"}),
    ],
)
def test_parts_import_only_what_they_may(modules: list[str], forbidden: set[str]) -> None:
    imports = ", ".join(f"inference_service.{module}" for module in modules)
    program = f"import sys, {imports}\nprint(*{forbidden!r}.intersection(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == ""


def test_example_configuration_has_every_key() -> None:
    """configs/cpu.yaml is the reference of all keys; but for the model's size they have their defaults."""
    path = ROOT / "configs" / "cpu.yaml"
    assert leaves(yaml.safe_load(path.read_text())).keys() == leaves(msgspec.to_builtins(Config())).keys()
    example, default = leaves(msgspec.to_builtins(load_config(path))), leaves(msgspec.to_builtins(Config()))
    assert {key for key in default if example[key] != default[key]} == {"model.max_context", "device.kind"}


def leaves(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat.update(leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat
