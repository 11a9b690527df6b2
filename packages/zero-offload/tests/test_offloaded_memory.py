"""Memory at rest is what the footprint says: counted exactly, and measured."""

from __future__ import annotations

import gc
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
