"""Generates the gRPC stubs beside the .proto files: `python protos/build_stubs.py`, and as a step of every build of the package."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

from setuptools.command.build_py import build_py

PROTOS = Path(__file__).parent


class BuildStubs(build_py):
    """setuptools' build_py, which finds the stubs already made."""

    def run(self) -> None:
        build_stubs()
        super().run()


def build_stubs() -> None:
    """Writes *_pb2.py, *_pb2.pyi and *_pb2_grpc.py; exits with protoc's message if a .proto file is wrong."""
    # Imported only here: setuptools loads this module before it knows whether anything is to be built.
    from grpc_tools import protoc

    well_known = files("grpc_tools") / "_proto"
    outputs = [f"--{kind}_out={PROTOS}" for kind in ("python", "pyi", "grpc_python")]
    sources = sorted(str(path) for path in PROTOS.rglob("*.proto"))
    if status := protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *outputs, *sources]):
        sys.exit(status)


if __name__ == "__main__":
    build_stubs()
