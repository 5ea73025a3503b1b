"""`telemetry.flashinfer_log_level`, against the logging code of FlashInfer's own wheels."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_flashinfer_contract import NEWEST, OLDEST, wheel

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "observability.md"
PROGRAM = """
import importlib.util, sys
from inference_service.engine.process import log_flashinfer
log_flashinfer(int(sys.argv[2]))
spec = importlib.util.spec_from_file_location("api_logging", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["api_logging"] = module
spec.loader.exec_module(module)
print("result", module.flashinfer_api(lambda query: query + 1)(41))
"""


def test_calls_are_logged_to_stderr(tmp_path: Path) -> None:
    (tmp_path / "api_logging.py").write_bytes(wheel(OLDEST).read("flashinfer/api_logging.py"))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "api_logging.py"), "3"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout == "result 42\n", "stdout has the server's address for whoever started it, and nothing else"
    assert "FlashInfer API Call: " in ran.stderr and "41" in ran.stderr


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_what_the_documentation_names_is_what_flashinfer_reads(version: str) -> None:
    documented = set(re.findall(r"FLASHINFER_[A-Z_]+[A-Z]", DOCUMENTATION.read_text()))
    source = b"".join(wheel(version).read(f"flashinfer/{name}.py") for name in ("api_logging", "jit/core")).decode()
    assert {name for name in documented if f'"{name}"' not in source} == set()
    assert {"FLASHINFER_LOGLEVEL", "FLASHINFER_LOGDEST"} <= documented
