"""Bytes on the device, on the host and on the disk are the formula of what rests where."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import parity
import pytest
import torch
import zero_engine
from attrs import evolve
from parity import ZeroConfig
from residences import Cell, cells, resting_as
from zero_comm import Group
from zero_engine import Precision
from zero_offload import CPUAdam
from zero_partition import memory_report
from zero_partition.seams import find_sharded

WIDTH: Final = 64
NUM_BLOCKS: Final = 4
PSI: Final = NUM_BLOCKS * WIDTH * WIDTH // 2  # elements of a rank's shards; two ranks
SUBGROUP: Final = 8192
PAGE: Final = 4096  # sub-groups on the disk are whole ones


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_at_rest_are_the_formula(ranks, tmp_path: Path, precision: str) -> None:
    """What a user plans with: where each copy is, and that nothing has two places."""
    ranks(2).run(_at_rest, folder=str(tmp_path), precision=precision, timeout_s=60)


def _at_rest(group: Group, folder: str, precision: str) -> None:
    for stage in (1, 2, 3):
        for cell in cells(stage):
            if cell.residence == "engine":
                _check_at_rest(group, cell, folder, is_bf16=precision == "bf16")


def _check_at_rest(group: Group, cell: Cell, folder: str, *, is_bf16: bool) -> None:
    model = parity.build(parity.Chain)
    optimizer = CPUAdam(model.parameters(), lr=1e-2)
    offload = evolve(cell.offload(folder), subgroup_bytes=SUBGROUP)
    precision = Precision(params=torch.bfloat16) if is_bf16 else None
    with resting_as(cell):
        zero_engine.shard(
            model,
            optimizer,
            ZeroConfig(cell.stage, offload=offload, precision=precision),
            group=group,
        )
    for _ in range(2):
        _step(model, optimizer)

    report = memory_report(model)

    shards = PSI * (2 if is_bf16 else 4)
    at_home = cell.params != "device"
    params_bytes = (0 if at_home else shards) * (1 if cell.stage == 3 else 2)
    assert report.params_bytes == params_bytes, (cell, report)
    has_masters = is_bf16 or at_home
    state = PSI * (12 if has_masters else 8)
    fraction = cell.fraction if cell.optimizer != "device" else 0
    numel_error = 64 * 12  # parameters are cut at multiples of 64 elements
    assert abs(report.optimizer_bytes - state * (1 - fraction)) <= numel_error, (cell, report)

    residence = find_sharded(model).residence
    files = _files(residence)
    kept = residence.home.disk_bytes if at_home else 0
    assert kept == (shards if cell.params == "disk" else 0), (cell, report)
    passing = residence.home.host_bytes - shards * (cell.params == "host") if at_home else 0
    # Two units read ahead, two written behind, and those that a sub-group of state spans.
    assert 0 <= passing <= 6 * shards // NUM_BLOCKS * (cell.params == "disk"), (cell, report)

    on_disk, in_memory = report.disk_bytes - kept, report.host_bytes - passing
    in_memory -= shards * (cell.params == "host")
    num_groups = len(files) - NUM_BLOCKS * (cell.params == "disk")
    in_memory -= SUBGROUP * min(3, num_groups)  # slots
    padding = report.optimizer_bytes + on_disk + in_memory - state
    assert 0 <= padding <= num_groups * PAGE, (cell, report)
    if cell.optimizer == "disk":
        assert in_memory < SUBGROUP // 2, (cell, report)  # a sub-group that is not worth a file
        assert num_groups == on_disk // SUBGROUP > 0 or not fraction, (cell, report)
    assert sum(path.stat().st_size for path in files) == report.disk_bytes, (cell, report)
    zero_engine.unshard(model, optimizer)


def _files(residence: Any) -> list[Path]:
    home, state = residence.home, residence.offload
    store = getattr(home, "_store", None) or (None if state is None else state.store)
    return [] if store is None else sorted(store.folder.iterdir())


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.ones(1, WIDTH, dtype=dtype)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
