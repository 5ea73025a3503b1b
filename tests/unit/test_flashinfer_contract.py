"""Every call of FlashInfer, served or measured, fits the FlashInfer that ran on the GPU, and a newer one: read in their wheels, not run.

Where more than the arguments must fit and a version does not, the support table refuses it there.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch

from baselines import kernels as measured
from inference_service import kernels as served
from inference_service.execution.tuning import cache_directory
from inference_service.kernels import support
from inference_service.kernels.flashinfer_fa3 import Fa3Prefill
from inference_service.kernels.flashinfer_paged import Fa2Decode, Fa2Prefill
from inference_service.kernels.versions import at_least

OLDEST, NEWEST = "0.6.13", "0.7.4"
WRAPPER, RAGGED, MLA = (
    "prefill.BatchPrefillWithPagedKVCacheWrapper",
    "prefill.BatchPrefillWithRaggedKVCacheWrapper",
    "mla.BatchMLAPagedAttentionWrapper",
)
WITH_BACKENDS = {"wrapper": WRAPPER, "ragged_wrapper": RAGGED, "mla_wrapper": MLA}
POD, BATCH_POD, HOLISTIC = "pod.PODWithPagedKVCacheWrapper", "pod.BatchPODWithPagedKVCacheWrapper", "attention.BatchAttention"
WRAPPERS = WITH_BACKENDS | {
    "decode": "decode.BatchDecodeWithPagedKVCacheWrapper",
    "holistic": HOLISTIC,
    "holistic_wrapper": HOLISTIC,
    "cascade": "cascade.MultiLevelCascadeAttentionWrapper",
    "pod": POD,
    "pod_wrapper": POD,
    "batch_pod": BATCH_POD,
    "batch_pod_wrapper": BATCH_POD,
}
"""FlashInfer's classes, by what their objects are called where their methods are."""
Definition = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Call:
    """A call: of which function of FlashInfer, with how many positional arguments, and which keywords."""

    function: str
    positional: int
    keywords: tuple[str, ...]
    texts: tuple[tuple[str, str], ...]
    """Keywords that are given a constant text, such as the name of a backend."""


@cache
def wheel(version: str) -> ZipFile:
    """FlashInfer's wheel, downloaded once."""
    folder = cache_directory().parent / "wheels"
    pattern = f"flashinfer_python-{version}-*.whl"
    if not any(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
        done = subprocess.run([*command, f"flashinfer-python=={version}"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"FlashInfer {version} is not here, and cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    return ZipFile(next(folder.glob(pattern)))


@cache
def tree(version: str, module: str) -> tuple[ast.Module, bool]:
    """A module of FlashInfer, and whether it is a package."""
    path = "/".join(["flashinfer", *module.split(".")] if module else ["flashinfer"])
    names = set(wheel(version).namelist())
    package = f"{path}/__init__.py" in names
    return ast.parse(wheel(version).read(f"{path}/__init__.py" if package else f"{path}.py")), package


def find(version: str, module: str, name: str) -> Definition:
    """A function or class, wherever the module has it from; of overloads the one that is run, which is the last."""
    parsed, package = tree(version, module)
    definitions = [node for node in parsed.body if isinstance(node, Definition) and node.name == name]
    if definitions:
        return definitions[-1]
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) in (name, "*") for alias in node.names):
            original = next((alias.name for alias in node.names if (alias.asname or alias.name) == name), name)
            parts = ["flashinfer", *filter(None, module.split("."))]
            parent = parts[: len(parts) + package - node.level] if node.level else []
            return find(version, ".".join([*parent, *filter(None, [node.module])]).removeprefix("flashinfer."), original)
    raise AssertionError(f"FlashInfer {version} has no {module}.{name}")


def function(version: str, path: str) -> ast.FunctionDef:
    """By its path within the package, such as norm.rmsnorm; a class stands for what makes it."""
    module, _, name = path.rpartition(".")
    if module in (*WRAPPERS.values(), "jit.core.JitSpec", "autotuner.AutoTuner"):
        module, _, owner = module.rpartition(".")
        found = find(version, module, owner)
    else:
        found, name = find(version, module, name), "__init__"
    if isinstance(found, ast.FunctionDef):
        return found
    methods = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
    # Newer wrappers' plan() hands its keywords on.
    return methods["_plan_impl" if "self._plan_impl(" in ast.unparse(methods[name]) else name]


def signature(definition: ast.FunctionDef) -> Signature:
    """Of the arguments after `self`."""
    given = definition.args
    places = [*given.posonlyargs, *given.args]
    required = len(places) - len(given.defaults)
    parameters = [
        Parameter(place.arg, Parameter.POSITIONAL_OR_KEYWORD, default=Parameter.empty if index < required else None)
        for index, place in enumerate(places)
        if place.arg != "self"
    ]
    parameters += [Parameter(given.vararg.arg, Parameter.VAR_POSITIONAL)] if given.vararg else []
    parameters += [
        Parameter(keyword.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None)
        for keyword, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    parameters += [Parameter(given.kwarg.arg, Parameter.VAR_KEYWORD)] if given.kwarg else []
    return Signature(parameters)


def calls() -> set[Call]:
    """What is called by its full name, and of the wrappers by those names."""
    found = set()
    for file in (file for package in (served, measured) for file in Path(next(iter(package.__path__))).glob("*.py")):
        if "flashinfer." not in file.read_text():
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                root, _, path = ast.unparse(node.func).partition(".")
                if root == "flashinfer" or (root in WRAPPERS and path in ("plan", "run")):
                    keywords = tuple(str(keyword.arg) for keyword in node.keywords)
                    constants = [(str(k.arg), k.value.value) for k in node.keywords if isinstance(k.value, ast.Constant)]
                    texts = tuple((name, value) for name, value in constants if isinstance(value, str))
                    found.add(Call(path if root == "flashinfer" else f"{WRAPPERS[root]}.{path}", len(node.args), keywords, texts))
    return found


CALLS = sorted(calls(), key=lambda call: call.function)


def test_the_calls_are_found() -> None:
    assert len(CALLS) >= 30
    methods = {f"{wrapper}.{method}" for wrapper in WRAPPERS.values() for method in ("plan", "run")}
    assert {"norm.rmsnorm", "fused_moe.cutlass_fused_moe", *WRAPPERS.values(), *methods} <= {call.function for call in CALLS}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.function)
def test_the_arguments_that_are_given_fit(call: Call, version: str) -> None:
    definition = function(version, call.function)
    bound = signature(definition).bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
    assert set(call.keywords) <= set(bound.arguments), "no argument may vanish in **kwargs"
    lowest = next((row.requires["flashinfer"] for row in support.TABLE if row.backend in dict(call.texts).values()), OLDEST)
    for name, text in call.texts:
        known = text in allowed(version, definition, name)
        assert known == at_least(version, lowest), f"{name}={text!r}"


def allowed(version: str, definition: ast.FunctionDef, name: str) -> str | list[str]:
    """The texts that an argument may be: those of its Literal, the layouts, else whatever the function's own text mentions."""
    annotation = next(argument.annotation for argument in [*definition.args.args, *definition.args.kwonlyargs] if argument.arg == name)
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).endswith("Literal"):
        texts: list[str] = list(ast.literal_eval(annotation.slice))
        return texts
    text = ast.unparse(definition)
    return ast.unparse(find(version, "utils", "TensorLayout")) if f"_check_kv_layout({name})" in text else text


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("wrapper", WITH_BACKENDS.values())
def test_the_backends_of_the_wrappers_are_known(version: str, wrapper: str) -> None:
    text = ast.unparse(function(version, wrapper))
    assert all(f"{backend.backend}" in text for backend in (Fa2Decode, Fa2Prefill, Fa3Prefill))


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize(
    ("path", "positional"), [("jit.core.JitSpec.build_and_load", 0), ("autotuner.AutoTuner.get", 1), ("autotuner.AutoTuner.choose_one", 4)]
)
def test_what_is_replaced_is_there(version: str, path: str, positional: int) -> None:
    signature(function(version, path)).bind(*[None] * positional)


@pytest.mark.parametrize(("version", "checks"), [(OLDEST, False), (NEWEST, True)])
def test_plans_of_latents_in_graphs_are_refused_where_their_pages_are_checked(version: str, checks: bool) -> None:
    """They have the pages of a graph's table, which are more than the contexts'."""
    sources = [name for name in wheel(version).namelist() if name.startswith("flashinfer/mla/") and name.endswith(".py")]
    assert checks == any(b"must equal ceil(kv_len_arr" in wheel(version).read(name) for name in sources)
    here = support.Setting("sm_90", torch.bfloat16, 192, 16, 64, {"flashinfer": version, "cuda": "13.0", "triton": "3.6"})
    refusals = [row.refusal(here) for row in support.rows("mla_decode") if row.backend in ("fa2", "fa3", "triton+fa3")]
    assert len(refusals) == 3 and all(bool(refusal) == checks for refusal in refusals)


@pytest.mark.parametrize("buffer", ["_int_workspace_buffer", "_pin_memory_int_workspace_buffer"])
def test_plans_of_latents_lie_where_they_are_told_to(buffer: str) -> None:
    """`flashinfer_ops.make_mla_graph_wrapper` lets wrappers share what has no argument; refused are the versions that have it otherwise."""
    made, planned, run = (ast.unparse(function(OLDEST, path)) for path in (MLA, f"{MLA}.plan", f"{MLA}.run"))
    assert f"self.{buffer} = torch.empty(" in made and f"self.{buffer}," in planned
    assert (f"self.{buffer}," in run) == (buffer == "_int_workspace_buffer")


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_pod_still_needs_the_default_stream(version: str) -> None:
    """As `flashinfer_pod_ops.pod` gives it; batch POD clears its counters on the stream it runs on."""
    text, batch = (
        wheel(version).read(f"flashinfer/data/include/flashinfer/attention/{name}.cuh").decode() for name in ("pod", "batch_pod")
    )
    assert "cudaMemset(" in text and "cudaMemset(" not in batch


def test_an_installed_flashinfer_is_the_one_that_was_read() -> None:
    """Where FlashInfer is installed, the calls fit what can be imported, too."""
    flashinfer = pytest.importorskip("flashinfer")
    importlib.import_module("inference_service.kernels.flashinfer_ops")
    for call in CALLS:
        target: Any = flashinfer
        for part in call.function.split("."):
            target = getattr(target, part)
        if not call.function.startswith(tuple(WRAPPERS.values())):
            inspect.signature(target).bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
