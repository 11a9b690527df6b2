"""Saving on a CUDA device, which values leave in chunks. docs/gpu.md says what has run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import nn
from zero_engine import Saver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return zero_engine.shard(model, optimizer, ZeroConfig(3))


def _run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(3):
        loss = model(torch.ones(4, 64, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("how", ["save", "in background", "overlapped"])
def test_a_run_on_a_device_goes_on_with_its_dropout(tmp_path: Path, how: str) -> None:
    """Its generator is the device's, and its step counts lie there."""
    model, optimizer = _make(0)
    _run(model, optimizer)
    if how == "save":
        zero_engine.save(tmp_path, model, optimizer, step=3)
        expected = _run(model, optimizer)
    else:
        with Saver(tmp_path, model, optimizer, overlap=how == "overlapped") as saver:
            saver.save(step=3)
            expected = _run(model, optimizer)
    again, its = _make(1)

    zero_engine.load(tmp_path, again, its)

    assert _run(again, its) == expected
