"""Checkpoints that keep shards of their inputs, of a model that keeps shards of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zero_engine
from torch import Tensor, nn
from zero_ckpt import Checkpointer, PackedSaver
from zero_comm import Group
from zero_engine import ZeroConfig

pytestmark = pytest.mark.xdist_group("ranks")


class _Stack(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(9), nn.Linear(9, 9), nn.GELU(), nn.Dropout(0.2))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x


def _train(group: Group, run: Callable[..., Any], stage: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = _Stack(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    numbers = []
    for _ in range(3):
        x = torch.randn(5, 9)  # the same on all ranks, as in a model-parallel group
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        numbers += [loss.detach(), torch.get_rng_state()]
    return numbers + list(zero_engine.full_state_dict(model).values())


@pytest.mark.parametrize("stage", [1, 3])
def test_one_group_gathers_parameters_and_inputs(ranks: Any, stage: int) -> None:
    """Messages of the two must not be taken for each other, nor in another order."""
    ranks(2).run(_both, stage=stage)


def _both(group: Group, stage: int) -> None:
    expected = _train(group, lambda function, *args: function(*args), stage)
    for num_slots in (None, 4):
        saver = PackedSaver(group=group, num_slots=num_slots)
        found = _train(group, Checkpointer(saver=saver).checkpoint, stage)

        assert all(map(torch.equal, found, expected))
        assert saver.kept_bytes() == {}
