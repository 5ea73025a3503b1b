"""What the start on a GPU derives: batch sizes to capture, pages that fit, and what `prebuild` has kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inference_service.config import ConfigError, load_config
from inference_service.execution.graphs import buckets, decode_sizes, mixed_sizes
from inference_service.execution.memory import GIB, OUTSIDE_BYTES, Needs, own_bytes
from inference_service.execution.packed_inputs import Sizes, SlotTable
from inference_service.execution.tuning import Tuning, compare, find_misfit, load_tuning, save_tuning, tuning_file

NEEDS = Needs(total=100 * GIB, others=0, loaded=60 * GIB, graphs=2 * GIB, activations=3 * GIB)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 12, 100, 256, 1000])
def test_every_batch_has_a_graph_of_at_most_half_as_many_rows_more(most: int) -> None:
    sizes = buckets(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    for rows in range(8, most + 1):
        assert min(size for size in sizes if size >= rows) < rows + max(4, rows / 4 + 1)


def test_every_decode_step_has_a_graph_and_short_contexts_a_narrow_one() -> None:
    slots = SlotTable(256, 256, 64)
    decodes = decode_sizes(256, slots)
    assert {sizes.pages for sizes in decodes if sizes.tokens == 1} == {16, 64, 256}
    assert all(any(sizes.holds(Sizes(rows, rows, rows, 256)) for sizes in decodes) for rows in range(1, 257))
    mixed = mixed_sizes(256, 300, slots)
    assert [(sizes.tokens, sizes.rows) for sizes in mixed][-2:] == [(192, 192), (256, 256)]
    assert not any(sizes.holds(Sizes(1, 1, 1, 16)) for sizes in mixed)
    # A table that is narrower than all that is captured for.
    assert {sizes.pages for sizes in decode_sizes(4, SlotTable(4, 3, 16))} == {16}


def test_the_pool_gets_what_the_fraction_leaves() -> None:
    config = load_config(None, ["cache.gpu_memory_fraction=0.9"])
    assert NEEDS.pages(config, 1 << 20) == 25 * 1024
    assert NEEDS.pages(load_config(None, ["cache.pages=7"]), 1 << 20) == 7
    assert "KV pool 25.00, other processes 0.00, free 10.00" in NEEDS.ledger(25 * GIB)
    with pytest.raises(ConfigError, match=r"cache\.gpu_memory_fraction: 0\.65 of 100\.0 GiB leaves no room"):
        NEEDS.pages(load_config(None, ["cache.gpu_memory_fraction=0.65"]), 1 << 20)


def test_other_processes_take_nothing_of_the_share_but_bound_it() -> None:
    config = load_config(None, ["cache.gpu_memory_fraction=0.4"])
    needs = Needs(total=100 * GIB, others=45 * GIB, loaded=20 * GIB, graphs=2 * GIB, activations=3 * GIB)
    assert needs.pages(config, 1 << 20) == 15 * 1024
    assert "other processes 45.00, free 15.00" in needs.ledger(15 * GIB)
    # 2 % stay free beside others that have more than the fraction leaves.
    crowded = replace(needs, others=70 * GIB)
    assert crowded.pages(config, 1 << 20) == 3 * 1024
    assert "free 2.00" in crowded.ledger(3 * GIB)
    with pytest.raises(ConfigError, match=r"cache\.gpu_memory_fraction: .*other processes 73\.00"):
        replace(needs, others=73 * GIB).pages(config, 1 << 20)


@pytest.mark.parametrize(
    ("grown", "ours"),
    [
        (21, 21),  # Alone: weights, code and context.
        (21 - 30, 20),  # A predecessor that held 30 GiB ended meanwhile.
        (21 + 30, 24),  # A neighbour started and took 30 GiB.
    ],
)
def test_what_neighbours_take_and_give_back_is_not_ours(grown: int, ours: int) -> None:
    assert own_bytes(grown * GIB, held=20 * GIB) == ours * GIB


def test_what_graphs_take_is_never_negative() -> None:
    assert own_bytes(2 * GIB, held=GIB) == 2 * GIB
    assert own_bytes(-30 * GIB, held=0) == 0
    assert own_bytes(30 * GIB, held=0) == OUTSIDE_BYTES


def test_a_measurement_counts_only_where_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCE_SERVICE_CACHE", str(tmp_path))
    here, elsewhere = {"gpu": "NVIDIA H200", "flashinfer": "0.6.13"}, {"gpu": "NVIDIA H200", "flashinfer": "0.7.4"}
    assert load_tuning(here) is None
    tuning = Tuning(here, {"attention_prefill": "fa3"}, {"attention_prefill": {"fa3": 300.0, "fa2": 511.0}})
    path = save_tuning(tuning)
    assert load_tuning(here) == tuning and load_tuning(elsewhere) is None
    path.write_text("{")
    assert load_tuning(here) is None
    assert path == tuning_file(here) and list(path.parent.iterdir()) == [path]


HERE = {"gpu": "NVIDIA H200", "architecture": "sm_90", "flashinfer": "0.6.13", "cuda": "13.0", "triton": "3.6.0", "torch": "2.11.0"}


def test_what_was_prebuilt_elsewhere_is_refused_and_both_sides_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCE_SERVICE_CACHE", str(tmp_path))
    assert find_misfit(HERE) == ""
    save_tuning(Tuning(HERE | {"architecture": "sm_100", "cuda": "12.8"}, {}, {}))
    save_tuning(Tuning(HERE | {"architecture": "sm_100", "gpu": "NVIDIA B200"}, {}, {}))
    misfit = find_misfit(HERE)
    assert str(tmp_path) in misfit and "prebuilt for architecture sm_100, but here is architecture sm_90" in misfit
    # Another model, prebuilt on this GPU: what is compiled for it fits.
    save_tuning(Tuning(HERE | {"mlp": "another"}, {}, {}))
    assert find_misfit(HERE) == ""


@pytest.mark.parametrize(("key", "other"), [("flashinfer", "0.7.4"), ("cuda", "12.9"), ("triton", "3.7.0"), ("torch", "2.13.0")])
def test_each_version_counts(key: str, other: str) -> None:
    misfit = compare("the cache", [HERE | {key: other}], HERE)
    assert misfit.startswith(f"the cache was prebuilt for {key} {other}, but here is {key} {HERE[key]}:")
    assert compare("the cache", [{}], HERE) == compare("the cache", [{"flashinfer": "0.6.13"}], HERE) == ""


def test_graphs_need_no_gpu_to_be_imported() -> None:
    from inference_service.execution import cuda_executor, cuda_start

    assert cuda_executor and cuda_start and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
