"""State between ZeroRedundancyOptimizer and the sharded optimizer of stage 1, both ways."""

from __future__ import annotations

import copy

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zero_comm import Group
from zero_partition import ZeroRedundancyOptimizer, unpartition


@pytest.mark.parametrize("world_size", [2])
def test_either_goes_on_where_the_other_stopped(ranks, world_size: int) -> None:
    """Who outgrows the one line takes the run along, and may come back."""
    ranks(world_size).run(_change_twice)


def _change_twice(group: Group) -> None:
    plain, model = (parity.build(parity.tiny_float32) for _ in range(2))
    oracle = torch.optim.AdamW(plain.parameters(), lr=0.01, foreach=False)
    replica = DistributedDataParallel(plain, find_unused_parameters=True)

    def make_ours() -> ZeroRedundancyOptimizer:
        params = model.parameters()
        return ZeroRedundancyOptimizer(params, torch.optim.AdamW, group, lr=0.01, foreach=False)

    ours = make_ours()
    _train(DistributedDataParallel(model, find_unused_parameters=True), ours, group, range(2))
    ours.consolidate_state_dict(to=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    optimizer.load_state_dict(ours.state_dict())
    zero_engine.shard(model, optimizer, ZeroConfig(1), group=group)
    _train(model, optimizer, group, range(2, 4))
    unpartition(model)
    ours = make_ours()
    ours.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _train(DistributedDataParallel(model, find_unused_parameters=True), ours, group, range(4, 6))
    _train(replica, oracle, group, range(6))

    for (name, mine), theirs in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, steps: range) -> None:
    for step in steps:
        parity.loss_of(model, parity.batch(step, 0, group.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
