"""`inference-service check` on the GPU, with what was prebuilt for another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inference_service.check import print_check
from inference_service.config import ConfigError, load_config
from inference_service.execution.device import find_device
from inference_service.execution.tuning import Tuning, save_tuning
from inference_service.kernels.versions import installed_versions
from tests.gpu.tiny import FAMILIES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(("key", "other"), [("architecture", "sm_75"), ("flashinfer", "0.5.0"), ("cuda", "12.1")])
def test_what_was_prebuilt_elsewhere_is_refused(key: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCE_SERVICE_CACHE", str(tmp_path / "cache"))
    shape = FAMILIES["qwen3-moe"]()
    shape.architectures = ["Qwen3MoeForCausalLM"]
    shape.save_pretrained(tmp_path / "model")
    config = load_config(None, ["device.kind=cuda", f"model.path={tmp_path / 'model'}", "model.load_format=dummy", "cache.page_size=64"])
    here = {"architecture": find_device(config).architecture, **installed_versions()}
    save_tuning(Tuning(here | {key: other}, {}, {}))
    with pytest.raises(ConfigError, match=rf"prebuilt for {key} {other}, but here is {key} {here[key]}"):
        print_check(config)
    save_tuning(Tuning(here, {}, {}))
    print_check(config)
