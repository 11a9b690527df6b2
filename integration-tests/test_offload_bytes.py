"""Bytes on device, host and disk are the formula of what rests where; what does not fit trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import capped_training
import parity
import pytest
import torch
import zero_engine
from attrs import evolve
from parity import ZeroConfig
from residences import Cell, cells, host_adam, resting_as, sharded
from torch import nn
from zero_comm import Group
from zero_engine import Precision
from zero_partition import memory_report
from zero_partition.seams import find_sharded

WIDTH: Final = 64
NUM_BLOCKS: Final = 4
PSI: Final = NUM_BLOCKS * WIDTH * WIDTH // 2  # elements of a rank's shards; two ranks
SUBGROUP: Final = 8192
PAGE: Final = 4096  # sub-groups on the disk are whole ones


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.ranks(timeout_s=60)
def test_bytes_at_rest_are_the_formula(group: Group, tmp_path: Path, precision: str) -> None:
    """What a user plans with: where each copy is, and that nothing has two places."""
    is_bf16 = precision == "bf16"
    chosen = [c for stage in (1, 2, 3) for c in cells(stage) if c.residence == "engine"]
    for cell in chosen[is_bf16::2]:  # by turns
        _check_at_rest(group, cell, tmp_path, is_bf16=is_bf16)


def _check_at_rest(group: Group, cell: Cell, folder: Path, *, is_bf16: bool) -> None:
    offload = evolve(cell.offload(folder), subgroup_bytes=SUBGROUP)
    precision = Precision(params=torch.bfloat16) if is_bf16 else None
    config = ZeroConfig(cell.stage, offload=offload, precision=precision)
    model = parity.build(parity.Chain)
    optimizer = host_adam(model.parameters())
    with resting_as(cell):
        zero_engine.shard(model, optimizer, config, group=group)
    for _ in range(2):
        _step(model, optimizer)

    report = memory_report(model)

    itemsize = 2 if is_bf16 else 4
    shards = PSI * itemsize
    at_home = cell.params != "device"
    whole = shards * (1 if cell.stage == 3 else 2)
    has_masters = is_bf16 and (cell.optimizer == "device" or not cell.fraction)
    if cell.stage == 3 and has_masters and group.device.type != "cpu":
        whole = 0  # rounded from masters where they travel
    assert report.params_bytes == (0 if at_home else whole), (cell, report)
    fraction = cell.fraction if cell.optimizer != "device" else 0
    is_away = group.device.type != "cpu" and fraction > 0  # the host's memory is another
    state = PSI * (12 if is_bf16 or at_home or is_away else 8)  # with masters
    beside = state * (1 - fraction)  # where shards of parameters rest
    on_device = 0 if at_home and fraction else beside
    # Parameters are cut at multiples of 64 elements.
    assert abs(report.optimizer_bytes - on_device) <= 64 * 12, (cell, report)

    kept = {"device": 0, "host": shards, "disk": shards}[cell.params]
    elsewhere = state - report.optimizer_bytes + kept
    if is_away and fraction == 1:
        elsewhere += PSI * itemsize  # gradients leave the device
    # Two units read ahead, two written behind, and those that a sub-group of state spans.
    passing = 6 * shards // NUM_BLOCKS * (cell.params == "disk")
    groups = -(-state // SUBGROUP) + NUM_BLOCKS
    slack = passing + 3 * SUBGROUP + groups * PAGE
    assert 0 <= report.host_bytes + report.disk_bytes - elsewhere <= slack, (cell, report)
    # A sub-group that is not worth a file stays in memory.
    on_disk = kept * (cell.params == "disk") + state * fraction * (cell.optimizer == "disk")
    assert -SUBGROUP // 2 <= report.disk_bytes - on_disk <= groups * PAGE, (cell, report)
    assert _files_bytes(find_sharded(model).residence) == report.disk_bytes, (cell, report)
    zero_engine.unshard(model, optimizer)


def _files_bytes(residence: Any) -> int:
    param_offload, state = residence.param_offload, residence.offload
    store = getattr(param_offload, "_store", None) or (None if state is None else state.store)
    return 0 if store is None else sum(path.stat().st_size for path in store.folder.iterdir())


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.ones(1, WIDTH, dtype=dtype)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- What does not fit ----


STATE_BYTES: Final = 16 * capped_training.NUM_PARAMS  # values, gradients, two moments, of fp32

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")


@pytest.mark.drawn(3)
@needs_proc
def test_a_model_of_three_times_the_memory_trains(tmp_path: Path) -> None:
    """The reason for all of this; and without offload the same memory does not do."""
    trained = _train(str(tmp_path))
    plain = _train("")

    assert trained.returncode == 0, trained.stderr[-3000:]
    assert "trained" in trained.stdout
    assert not list(tmp_path.iterdir())
    assert plain.returncode != 0, "the cap is no cap"
    assert "allocate memory" in plain.stderr or "MemoryError" in plain.stderr, plain.stderr[-3000:]


def _train(folder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, capped_training.__file__, folder, str(STATE_BYTES // 3)],
        env={**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _small() -> nn.Module:
    return parity.Chain(2, 16)


@needs_proc
@pytest.mark.ranks(1, timeout_s=120)
def test_hundreds_of_steps_take_no_more_than_a_few(group: Group, tmp_path: Path) -> None:
    """A leak of a descriptor or of a page a step ends a run in its second week."""
    with sharded(group, Cell(3, "disk", "disk"), tmp_path, make=_small, stage=3) as both:
        model, optimizer = both
        held = []
        for step in range(300):
            model(torch.ones(1, 16)).square().mean().backward()
            zero_engine.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step in (99, 299):
                held.append(_held(tmp_path))
    (rss, descriptors, files), (rss_after, descriptors_after, files_after) = held
    assert descriptors_after == descriptors
    assert files_after == files
    assert rss_after - rss < 2**20, f"{rss_after - rss} bytes more in 200 steps"


def _held(folder: Path) -> tuple[int, int, list[tuple[str, int]]]:
    """Resident bytes, open descriptors, and files with their sizes."""
    status = Path("/proc/self/status").read_text().splitlines()
    rss = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))
    files = [(str(path), path.stat().st_size) for path in folder.rglob("*")]
    return rss, len(list(Path("/proc/self/fd").iterdir())), sorted(files)
