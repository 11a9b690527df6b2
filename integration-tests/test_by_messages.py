"""Stage 3 where ranks cannot read each other's memory: gathers are launched ahead and waited for.

So it is on several hosts and with NCCL. Here ranks of one host send messages, because their group
was made so.
"""

from __future__ import annotations

import os
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import zero_engine
from parity import Recipe, ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_partition import find_sharded


def _by_messages() -> Group:
    with mock.patch.dict(os.environ, {"ZERO_COMM_PEER_MEMORY": "0"}):
        group = Group.from_process_group(dist.new_group())
    assert group.peers is None
    return group


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("world_size", [2, 3])
def test_stage_3_trains_by_messages_as_by_reading(ranks, world_size: int, window: int) -> None:
    """What travels ahead must arrive in the right slot, of the right step, and be waited for."""
    ranks(world_size).run(_trains_as_alone, timeout_s=60.0, window=window)


def _trains_as_alone(group: Group, window: int) -> None:
    recipe = Recipe(num_micro_batches=2, max_norm=0.5)
    expected = parity.train_alone(recipe, rank=group.rank, world_size=group.world_size, stage=3)
    ours = parity.train_sharded(_by_messages(), recipe, ZeroConfig(3, window=window))
    parity.assert_same(ours, expected, rank=group.rank, what=f"window {window}")


class _Turns(nn.Module):
    """Blocks in an order that a call chooses: what was launched ahead is often not what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(parity.Block() for _ in range(5))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = self.blocks[index](x)
        return x


ORDERS = [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [0, 0, 2, 0], [1], [0, 1, 2, 3, 4], [3, 1, 3, 1, 4, 2]]


@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_changed_order_costs_a_late_gather_and_no_number(ranks, window: int) -> None:
    """Training, evaluation by another way, a loop of varying length: the trace is only a guess."""
    ranks(2).run(_train_in_turns, window=window)


def _train_in_turns(group: Group, window: int) -> None:
    plain = parity.build(_Turns)
    expected = _steps(plain, parity.adamw(plain))
    model = parity.build(_Turns)
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(3, window=window), group=_by_messages())

    assert _steps(model, optimizer) == expected


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step, order in enumerate(ORDERS):
        x = torch.randn(4, parity.WIDTH, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            losses.append(model(x, order[::-1] + order).sum().item())
        loss = model(x, order).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(("window", "ahead"), [(1, 0), (2, 1), (4, 3)])
def test_as_many_units_travel_ahead_as_the_window_says(ranks, window: int, ahead: int) -> None:
    """Fewer hide nothing, more have no slot: the order is known from the second step on."""
    ranks(2).run(_count_ahead, window=window, ahead=ahead)


def _count_ahead(group: Group, window: int, ahead: int) -> None:
    model = parity.build(_Turns)
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(3, window=window), group=_by_messages())
    units = find_sharded(model).units
    seen: list[bool] = []  # of units, when the second begins: on its way, or there
    for _ in range(3):
        model(torch.ones(1, parity.WIDTH), ORDERS[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.blocks[1].register_forward_pre_hook(
        lambda *_: seen.extend(u.state.name == "GATHERING" or u.is_resident for u in units)
    )
    model(torch.ones(1, parity.WIDTH), ORDERS[0])

    assert sum(seen[2:]) == ahead, seen
