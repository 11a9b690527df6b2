"""Ranks that take different ways through one model: no hang, and the numbers of DDP."""

from __future__ import annotations

from collections.abc import Callable

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import assert_close, equal
from zero_partition.seams import find_sharded

STEPS = 4
WIDTH = 6
UNITS = ["up", *(f"layers.{i}" for i in range(4)), *(f"experts.{i}" for i in range(3)), "down"]


class Branches(nn.Module):
    """Experts of which each call uses one, and layers of which each call drops some."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.never = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, way: int) -> Tensor:  # noqa: D102
        x = self.up(x)
        for index, layer in enumerate(self.layers):
            if (way >> index) % 2:
                x = x + layer(x).tanh()
        return self.down(x + self.experts[way % 3](x))


class _Watched(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert self.unit.state.name == "UNSHARDED"
        return super().forward(x)


def _way(step: int, rank: int) -> int:
    """A different one for each rank, and another in each step."""
    return (7 * step + 5 * rank + 1) % 16


def _rows(step: int, rank: int) -> int:
    """Batches of uneven size; some are empty."""
    return (step + 2 * rank) % 3


def _other_branches(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(2, WIDTH, generator=generator), _way(step, rank)).square().mean()


def _uneven_and_empty_batches(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(_rows(step, rank), WIDTH, generator=generator)
    return model(x, 5).square().sum()


CASES: dict[str, Callable[[nn.Module, int, int], Tensor]] = {
    "other branches": _other_branches,
    "uneven and empty batches": _uneven_and_empty_batches,
}


_BY_READS = pytest.mark.cpu_only("ranks on CPUs of a host read each other's memory at stage 3")
_STAGES = [*parity.STAGES[:-1], pytest.param(3, marks=_BY_READS)]


@pytest.mark.parametrize(
    "case", [pytest.param("other branches", marks=_BY_READS), "uneven and empty batches"]
)
@pytest.mark.ranks(2, 3)
def test_ranks_on_different_ways_train_as_under_ddp(group: Group, case: str) -> None:
    """Mixture of experts, layer drop, the end of an epoch: today's systems wait for ever."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for step in range(STEPS):
            loss = CASES[case](model, step, group.rank)
            losses.append(loss.item())
            parity.finish_step(loss, optimizer)
        return losses

    plain = parity.build(Branches)
    expected = train(parity.as_ddp(plain, group), torch.optim.AdamW(plain.parameters(), lr=0.1))

    # DDP adds more than two ranks in an order of its own.
    tolerance = 0.0 if group.world_size == 2 else 1e-4
    exactly = {"rtol": tolerance, "atol": tolerance}
    for stage in parity.STAGES:
        model = parity.build(Branches)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
        assert_close(train(model, optimizer), expected, **exactly)
        whole = zero_engine.full_state_dict(model)
        if group.rank == 0:
            assert_close(whole, dict(plain.state_dict()), **exactly)


@pytest.mark.parametrize("transport", ["reads", "messages"])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_units_that_no_step_before_has_used_are_whole(
    group: Group, window: int, transport: str
) -> None:
    """A gather ahead took the slot of the unit whose use began, if that was in no recorded order.

    Its parameters were then gathered one by one, at their uses.
    """
    over = group if transport == "reads" else parity.by_messages()
    model, plain = parity.build(Branches), parity.build(Branches)
    for layer in (*model.layers, *model.experts):
        layer.__class__ = _Watched
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = ZeroConfig(3, window=window, min_unit_bytes=0, units=UNITS)
    zero_engine.shard(model, optimizer, config, group=over)
    for unit in find_sharded(model).units:
        model.get_submodule(unit.plan.name).unit = unit
    its_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    for way in (15, 15, 15, 11, 15, 15, 7, 5, 1, 1, 1, 8, 4, 2):  # the same on every rank
        loss, expected = model(x, way).square().mean(), plain(x, way).square().mean()
        assert_close(loss, expected)
        for each, step in ((loss, optimizer), (expected, its_optimizer)):
            each.backward()
            step.step()
            step.zero_grad()


@pytest.mark.parametrize("stage", _STAGES)
def test_ranks_evaluate_as_often_as_they_like(group: Group, stage: int) -> None:
    """Rank 0 alone computes a validation loss, or each rank generates until its own last token."""
    plain = parity.build(Branches)
    model = parity.build(Branches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    _other_branches(model, 0, group.rank).backward()
    optimizer.step()
    with torch.no_grad():
        for step in range(3 * group.rank):
            expected = _other_branches(plain, step, group.rank)
            assert equal(_other_branches(model, step, group.rank), expected)
    optimizer.zero_grad()
    _other_branches(model, 1, group.rank).backward()
    optimizer.step()


@pytest.mark.parametrize("stage", _STAGES)
def test_a_rank_without_a_batch_takes_part_in_the_step(group: Group, stage: int) -> None:
    """The last step of an epoch, where the data does not divide by the ranks."""
    alone = parity.build(Branches)
    alone_optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    model = parity.build(Branches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)

    for step in range(STEPS):
        (_other_branches(alone, step, 0) / 2).backward()  # the mean with nothing
        alone_optimizer.step()
        alone_optimizer.zero_grad()
        if group.rank == 0:
            _other_branches(model, step, 0).backward()
        else:
            zero_engine.backward_without_batch(model)
        optimizer.step()
        optimizer.zero_grad()

    whole = zero_engine.full_state_dict(model)
    if group.rank == 0:
        for name, value in alone.state_dict().items():
            assert equal(whole[name], value), name
