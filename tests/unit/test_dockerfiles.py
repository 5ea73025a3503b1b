"""The images' Dockerfiles, as far as they can be tested without Docker."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from string import Template

import pytest

from tests.unit.k8s_manifests import K8S, ROOT, Cluster
from tests.unit.test_flashinfer_contract import OLDEST, find

FILES = ("Dockerfile", "Dockerfile.cpu")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(name: str) -> list[tuple[str, str]]:
    """Each instruction and its arguments, continued lines joined."""
    lines = [line for line in (K8S / "docker" / name).read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in joined.splitlines()]


@pytest.mark.parametrize("name", FILES)
def test_hadolint_has_no_objection(name: str) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint is not here")
    done = subprocess.run([hadolint, K8S / "docker" / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", FILES)
def test_bases_are_pinned_and_the_user_is_the_pods(name: str) -> None:
    made = instructions(name)
    defaults = dict(arguments.split("=", 1) for instruction, arguments in made if instruction == "ARG" and "=" in arguments)
    for base in (Template(arguments).substitute(defaults) for instruction, arguments in made if instruction == "FROM"):
        assert re.fullmatch(r"[\w/]+:\d+\.\d+\.\d+-[\w.-]+( AS build)?", base), base
    (user,) = [arguments for instruction, arguments in made if instruction == "USER"]
    pods = Cluster().pools["h100"].workload.pod["securityContext"]
    assert user == f"{pods['runAsUser']}:{pods['runAsGroup']}"


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_is_there(name: str) -> None:
    for instruction, arguments in instructions(name):
        if instruction == "COPY" and "--from" not in arguments:
            for source in shlex.split(arguments)[:-1]:
                assert (ROOT / source).exists(), source


@pytest.mark.parametrize("name", FILES)
def test_what_is_installed_and_run_is_declared(name: str) -> None:
    made = instructions(name)
    (entry,) = [ast.literal_eval(arguments) for instruction, arguments in made if instruction == "ENTRYPOINT"]
    assert entry[0] in PROJECT["scripts"]
    extras = {extra for _, arguments in made for extra in re.findall(r"'\.\[(\w+)\]'", arguments)}
    assert extras and extras <= PROJECT["optional-dependencies"].keys()
    copied = {source for instruction, arguments in made if instruction == "COPY" for source in shlex.split(arguments)[:-1]}
    assert {"inference_service", "loadgen", "baselines", "protos"} <= copied, "each package of the wheel"


def test_flashinfer_is_the_extras() -> None:
    (pin,) = PROJECT["optional-dependencies"]["gpu"]
    assert any(pin in arguments for _, arguments in instructions("Dockerfile"))


def test_kernels_are_built_with_what_flashinfer_has() -> None:
    """In the FlashInfer that the image installs."""
    tree = ast.parse((K8S / "docker" / "build_kernels.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flashinfer.")]
    names = [(str(node.module).removeprefix("flashinfer."), alias.name) for node in imports for alias in node.names]
    makers = {name: find(OLDEST, module, name) for module, name in names if name.startswith("gen_")}
    assert len(makers) >= 8
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers]
    for call in calls:
        assert isinstance(call.func, ast.Name)
        maker = makers[call.func.id]
        assert isinstance(maker, ast.FunctionDef)
        required = len(maker.args.args) - len(maker.args.defaults)
        assert required <= len(call.args) <= len(maker.args.args), call.func.id
