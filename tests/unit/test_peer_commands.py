"""The command of every peer, made of one YAML file; and whether it is there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml
from gguf import GGUFWriter, LlamaFileType

from baselines.endpoints.peer import Launch, Site
from baselines.endpoints.peers import PEERS, NotInstalled, installed_version
from baselines.endpoints.tensorrt_llm import ORIENTATION
from inference_service.config import load_config

SETTINGS = """
model: {path: m, dtype: bfloat16, max_context: 2048, load_format: dummy}
device: {kind: cuda}
batch: {max_requests: 64}
cache: {gpu_memory_fraction: 0.8, prefix: false}
kernels: {attention_decode: fa2, attention_prefill: fa3}
"""
PYTHON = sys.executable
NO_MOE = "kernels.moe: cutlass has no equivalent in {}, which chooses by itself"


def launch(peer: str, directory: Path, *overrides: str, traces: str = "", model: str = "/models/m", program: str = "") -> Launch:
    file = directory / "experiment.yaml"
    file.write_text(SETTINGS)
    config = load_config(file, list(overrides))
    return PEERS[peer].launch(Site(config, file, directory, "it", model, "127.0.0.1", 8200, program, traces))


def words(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize(
    ("peer", "command", "env"),
    [
        (
            "vllm",
            f"{PYTHON} -m vllm.entrypoints.cli.main serve /models/m --host 127.0.0.1 --port 8200 --dtype bfloat16 --max-num-seqs 64 "
            "--max-model-len 2048 --gpu-memory-utilization 0.8 --load-format dummy --no-enable-prefix-caching "
            "--attention-backend FLASHINFER",
            {},
        ),
        (
            "sglang",
            f"{PYTHON} -m sglang.launch_server --model-path /models/m --host 127.0.0.1 --port 8200 --dtype bfloat16 "
            "--max-running-requests 64 --context-length 2048 --mem-fraction-static 0.8 --load-format dummy --disable-radix-cache "
            "--decode-attention-backend flashinfer --prefill-attention-backend fa3 --enable-metrics",
            {},
        ),
        (
            "tensorrt_llm",
            f"{PYTHON} -m tensorrt_llm.commands.serve serve /models/m --backend pytorch --host 127.0.0.1 --port 8200 --max_batch_size 64 "
            "--max_seq_len 2048 --kv_cache_free_gpu_memory_fraction 0.8 --extra_llm_api_options DIR/it.options.yaml",
            {},
        ),
        (
            "lmdeploy",
            f"{PYTHON} -m lmdeploy serve api_server /models/m --server-name 127.0.0.1 --server-port 8200 --dtype bfloat16 "
            "--max-batch-size 64 --session-len 2048 --cache-max-entry-count 0.8",
            {},
        ),
        (
            "lorax",
            "lorax-launcher --model-id /models/m --hostname 127.0.0.1 --port 8200 --dtype bfloat16 --max-concurrent-requests 320 "
            "--max-input-length 2047 --max-total-tokens 2048 --cuda-memory-fraction 0.8",
            {},
        ),
        (
            "tgi",
            "text-generation-launcher --model-id /models/m --hostname 127.0.0.1 --port 8200 --dtype bfloat16 --max-concurrent-requests 320 "
            "--max-batch-size 64 --max-input-tokens 2047 --max-total-tokens 2048 --cuda-memory-fraction 0.8",
            {"PREFIX_CACHING": "0", "ATTENTION": "flashinfer"},
        ),
        (
            "ours",
            f"{PYTHON} -m inference_service.cli serve --config DIR/experiment.yaml --set=server.host=127.0.0.1 --set=server.port=8200 "
            "--set=telemetry.traces=false",
            {},
        ),
    ],
)
def test_the_command_of_a_peer(peer: str, command: str, env: dict[str, str], tmp_path: Path) -> None:
    made = launch(peer, tmp_path)
    assert made.command == words(command.replace("DIR", str(tmp_path)))
    assert made.env == env


def gguf(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_command_of_llama_cpp_and_what_its_weights_are(tmp_path: Path) -> None:
    file = gguf(tmp_path / "model.gguf")
    made = launch("llama_cpp", tmp_path, "device.kind=cpu", "device.threads=1", model=str(file), program="/peers/llama-server")
    wanted = f"--model {file} --host 127.0.0.1 --port 8200 --parallel 64 --ctx-size 131072 --threads 1 --n-gpu-layers 0 --no-cache-prompt"
    assert made.command == ["/peers/llama-server", *words(wanted), "--metrics"]
    assert made.notes[0] == "weights of another type: Q4_1 from its GGUF file, where model.dtype is bfloat16"
    assert "--n-gpu-layers all" in " ".join(launch("llama_cpp", tmp_path, model=str(file)).command)
    with pytest.raises(ValueError, match=r"it: `model` must be a GGUF file for llama\.cpp, not /models/m"):
        launch("llama_cpp", tmp_path)


def test_what_trtllm_has_no_flag_for_and_that_it_is_an_orientation(tmp_path: Path) -> None:
    made = launch("tensorrt_llm", tmp_path, "kernels.attention_decode=xqa")
    assert yaml.safe_load((tmp_path / "it.options.yaml").read_text()) == {
        "dtype": "bfloat16",
        "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.8},
        "load_format": "dummy",
        "attn_backend": "TRTLLM",
    }
    assert ORIENTATION in made.notes


def test_on_a_cpu_there_is_no_share_of_a_gpu_and_auto_is_float32(tmp_path: Path) -> None:
    cpu = ["device.kind=cpu", "device.threads=1", "model.dtype=auto", "model.load_format=auto", "cache.memory_gib=1.5", "cache.prefix=true"]
    cpu += ["kernels.attention_decode=auto", "kernels.attention_prefill=auto"]
    made = launch("vllm", tmp_path, *cpu, program="/peers/python")
    wanted = "serve /models/m --host 127.0.0.1 --port 8200 --dtype float32 --max-num-seqs 64 --max-model-len 2048"
    assert made.command == ["/peers/python", "-m", "vllm.entrypoints.cli.main", *words(wanted)]
    assert (made.env, made.notes) == ({"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0)))}, [])
    assert words("--dtype float32 --device cpu") == launch("sglang", tmp_path, *cpu).command[9:13]


@pytest.mark.parametrize(
    ("peer", "notes"),
    [
        ("vllm", ["vLLM has one switch for all attention, which attention_decode has set to FLASHINFER", NO_MOE.format("vLLM")]),
        ("sglang", [NO_MOE.format("SGLang")]),
        ("tensorrt_llm", ["kernels.attention_prefill: fa3 has no equivalent in TensorRT-LLM", NO_MOE.format("TensorRT-LLM")]),
        (
            "lmdeploy",
            ["kernels.attention_decode: fa2 has no", "kernels.attention_prefill: fa3 has", NO_MOE.format("LMDeploy"), "load_format: dummy"],
        ),
        (
            "lorax",
            [
                "kernels.attention_decode: fa2 has no equivalent in LoRAX",
                NO_MOE.format("LoRAX"),
                "batch.max_requests",
                "load_format: dummy",
            ],
        ),
        ("tgi", ["one switch", NO_MOE.format("TGI"), "model.load_format: dummy has no equivalent in TGI"]),
    ],
)
def test_a_setting_without_an_equivalent_is_named(peer: str, notes: list[str], tmp_path: Path) -> None:
    made = launch(peer, tmp_path, "kernels.moe=cutlass").notes
    assert all(any(note in one for one in made) for note in notes), made
    assert not any(
        "kernels." in note for note in launch(peer, tmp_path, "kernels.attention_decode=auto", "kernels.attention_prefill=auto").notes
    )


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        ("vllm", "--otlp-traces-endpoint grpc://127.0.0.1:4317"),
        ("sglang", "--enable-trace --otlp-traces-endpoint 127.0.0.1:4317"),
        ("tensorrt_llm", "--otlp_traces_endpoint http://127.0.0.1:4317"),
        ("lorax", "--otlp-endpoint http://127.0.0.1:4317"),
        ("tgi", "--otlp-endpoint http://127.0.0.1:4317"),
        ("ours", '--set=telemetry.traces=true --set=telemetry.otlp_endpoint="" --set=telemetry.trace_file=DIR/it.traces.jsonl'),
    ],
)
def test_traces_are_exported_where_they_are_wanted(peer: str, words: str, tmp_path: Path) -> None:
    assert words.replace("DIR", str(tmp_path)) in " ".join(launch(peer, tmp_path, traces="127.0.0.1:4317").command)


def test_a_dtype_that_a_peer_lacks_is_left_to_it_with_a_note(tmp_path: Path) -> None:
    made = launch("tgi", tmp_path, "model.dtype=float32")
    assert "--dtype" not in made.command
    assert "model.dtype: float32 has no equivalent in TGI, which runs the checkpoint's" in made.notes


def test_what_is_not_installed_is_named_with_how_to_get_it() -> None:
    assert installed_version(PEERS["ours"], PYTHON, {})
    with pytest.raises(NotInstalled, match=r"not installed: .* has no package lmdeploy; pip install lmdeploy"):
        installed_version(PEERS["lmdeploy"], PYTHON, {})
    with pytest.raises(NotInstalled, match=r"not installed: cannot run /none/python: No such file or directory; pip install vllm"):
        installed_version(PEERS["vllm"], "/none/python", {})
    with pytest.raises(NotInstalled, match=r"not installed: there is no lorax-launcher; it comes with the container"):
        installed_version(PEERS["lorax"], "lorax-launcher", {})
