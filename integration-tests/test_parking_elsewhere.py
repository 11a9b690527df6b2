"""Parking a model of which a part rests on host or disk already: the rest goes there too."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import zero_engine
from torch import nn
from zero_comm import Group
from zero_engine import Offload, Precision, ZeroConfig
from zero_partition import memory_report

pytestmark = pytest.mark.xdist_group("ranks")

CONFIGS = {
    "state on the host": (1, {"optimizer": "host"}),
    "all on disk": (3, {"optimizer": "disk", "params": "disk"}),
    "a part of the state on the device": (3, {"optimizer": "host", "fraction": 0.4}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_with_offload_is_parked_and_goes_on(ranks, name: str, tmp_path: Path) -> None:
    """What steps elsewhere may not hold on to parameters, or no memory would come back."""
    stage, options = CONFIGS[name]
    ranks(2).run(_compare, stage=stage, options=options, folder=str(tmp_path))


def _compare(group: Group, stage: int, options: dict, folder: str) -> None:
    for precision in (None, Precision(params=torch.bfloat16)):
        offload = Offload(**options, path=folder if "disk" in options.values() else None)
        config = ZeroConfig(stage, min_unit_bytes=0, precision=precision, offload=offload)
        expected = _train(group, config, parks_to=None)
        assert _train(group, config, parks_to=folder) == expected


def _train(group: Group, config: ZeroConfig, *, parks_to: str | None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero_engine.shard(model, optimizer, config, group=group)
    dtype = torch.float32 if config.precision is None else torch.bfloat16
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(group.rank)).to(dtype)
    losses = []
    for step in range(4):
        loss = model(x).float().square().mean()
        loss.backward()
        if parks_to is not None and step == 1:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # nothing stays in memory because of a view of it
                zero_engine.offload_states(model, to="disk", path=parks_to)
            report = memory_report(model)
            assert report.params_bytes == report.gradients_bytes == 0
            assert report.parked_bytes > 0
            zero_engine.reload_states(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    zero_engine.unshard(model, optimizer)
    return losses
