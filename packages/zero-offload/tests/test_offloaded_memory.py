"""Memory at rest is what the footprint says: counted exactly, and measured."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from offloaded_training import CUT, HOMES, make_model, train
from zero_offload import OffloadedOptimizer, host_memory

PAGE_BYTES = 4096


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_is_held_is_the_formula(dtype: torch.dtype, home: str, tmp_path: Path) -> None:
    """A user plans a machine's memory by it: numel times the bytes of state, by share."""
    gc.collect()  # of other tests
    before = sum(host_memory().values())
    model = make_model(dtype)
    arguments = HOMES[home](tmp_path)
    offloaded = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, **arguments)
    train(model, offloaded, steps=range(2))

    footprint = offloaded.footprint
    numel = sum(param.numel() for param in model.parameters())
    element_bytes = 8 if dtype is torch.float32 else 12
    state_bytes = footprint.resident_bytes + footprint.disk_bytes + footprint.device_bytes
    padding = PAGE_BYTES * (footprint.disk_bytes // 7000 + 4)
    assert 0 <= state_bytes - numel * element_bytes <= padding
    assert footprint.slot_bytes <= 3 * (CUT["subgroup_bytes"] + PAGE_BYTES)
    if home == "shared":
        assert abs(footprint.device_bytes - 0.2 * numel * element_bytes) <= padding
        assert abs(footprint.resident_bytes - 0.3 * numel * element_bytes) <= padding
    if home != "lazy store":  # which keeps its values in memory
        held = sum(host_memory().values()) - before
        assert 0 <= held - footprint.host_bytes <= 4 * PAGE_BYTES

    offloaded.close()
    del offloaded
    if home != "lazy store":
        assert sum(host_memory().values()) == before


def test_an_optimizer_without_state_takes_no_memory() -> None:
    """Plain SGD is offloaded for nothing."""
    offloaded = OffloadedOptimizer(make_model().parameters(), torch.optim.SGD, lr=0.1)

    assert offloaded.footprint.host_bytes == 0


@pytest.mark.slow
def test_the_process_grows_by_the_footprint_within_two_percent(tmp_path: Path) -> None:
    """What the accounts say is worth nothing if copies lie elsewhere."""
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert found.returncode == 0, found.stderr
    grown, planned = map(int, found.stdout.split())
    assert abs(grown - planned) <= 0.02 * planned, (grown, planned)


SCRIPT = """
import gc, mmap, sys, torch, ctypes
from torch import nn
from zero_offload import OffloadedOptimizer

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE

def stepped(optimizer, model):
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.1)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

def make(numel, cut):
    model = nn.ParameterList([torch.zeros(numel) for _ in range(4)])
    kind = dict(state="disk", path=sys.argv[1], fraction={"host": 0.5}, subgroup_bytes=cut,
                small_bytes=0)
    return model, kind

model, kind = make(100_000, 200_000)  # what is loaded on first use is loaded
warm = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, **kind)
stepped(warm, model)
warm.close()
del warm
model, kind = make(4_000_000, 12_000_000)
before = resident()
optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, **kind)
stepped(optimizer, model)
print(resident() - before, optimizer.footprint.host_bytes)
"""
