"""Units of everything: dtypes, frozen and empty parameters, param groups with nothing to train.

All ranks see the same batch, so that the mean gradient of two is the gradient of one, bit for bit,
and plain torch in the same process is the oracle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from torch.nn.functional import linear
from training import assert_trains_as_plain, train
from zero_comm import Group
from zero_comm.testing import equal
from zero_partition import memory_report
from zero_partition.seams import find_sharded

WIDTH = 6
NUM_STEPS = 4


class _Mixed(nn.Module):
    """A block of every dtype that trains, and of two that only scale."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, 5)
        self.brain = nn.Linear(5, 7, dtype=torch.bfloat16)
        self.gain = nn.Parameter(torch.rand(7, dtype=torch.float16))
        self.wide = nn.Linear(7, WIDTH, dtype=torch.float64)
        self.steps = nn.Parameter(torch.tensor([1, 2, 3], dtype=torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False] * 3), requires_grad=False)
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.brain(torch.tanh(self.narrow(x)).bfloat16()) * self.gain
        y = self.wide(y.double()).float() * self.frozen
        return x + torch.where(self.mask, y, y * self.steps.repeat(2))


class _Empty(nn.Module):
    """Adapters of rank zero, as a sweep over ranks makes them, and a bias of nothing."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Parameter(torch.randn(rank, WIDTH))
        self.up = nn.Parameter(torch.randn(WIDTH, rank))
        self.nothing = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + linear(linear(x, self.down), self.up)) + self.nothing.sum()


class _OnlyEmpty(nn.Module):
    """A unit that has parameters and no element."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(3, 0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum()


def _stack(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, WIDTH), nn.Sequential(*blocks), nn.Linear(WIDTH, 1))


def _plain_blocks() -> nn.Module:
    return _stack(*(parity.Block() for _ in range(4)))


def _freeze(model: nn.Module, *blocks: int) -> nn.Module:
    for block in blocks:
        model[1][block].requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "several-dtypes": lambda: _stack(*(_Mixed() for _ in range(3))),
    "zero-sized": lambda: _stack(*(_Empty() for _ in range(3))),
    "units-of-nothing": lambda: _stack(*(_OnlyEmpty() for _ in range(3))),
    "a-frozen-block": lambda: _freeze(_plain_blocks(), 1, 2),
    "frozen-from-the-input": lambda: _freeze_input(_freeze(_plain_blocks(), 0, 1)),
    "all-but-one-frozen": lambda: _freeze(_plain_blocks(), 0, 1, 3),
}


def _freeze_input(model: nn.Module) -> nn.Module:
    """No gradient reaches the first frozen blocks, so that their outputs have no graph."""
    model[0].requires_grad_(False)
    return model


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        return model(x).square().mean()

    return train(model, optimizer, loss_of, num_steps=NUM_STEPS)


def _adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


# ---- What a unit may contain ----


@pytest.mark.parametrize("name", MODELS)
def test_a_unit_of_anything_trains_as_plain_torch(group: Group, name: str) -> None:
    """Each kind gets a buffer of its own; a flat buffer of the first one's dtype would cast."""
    faces = [(p.shape, p.dtype, p.requires_grad) for p in parity.build(MODELS[name]).parameters()]
    configs = map(ZeroConfig, parity.STAGES)
    for stage, (model, _) in enumerate(
        assert_trains_as_plain(group, MODELS[name], _train, *configs)
    ):
        assert [(p.shape, p.dtype, p.requires_grad) for p in model.parameters()] == faces, stage
        for unit in find_sharded(model).units:
            assert unit.depth == 0, f"stage {stage}: {unit.name}"
            # One that comes first in the next step may be on its way already.
            assert (unit.state.name == "UNSHARDED") == (stage < 3), f"stage {stage}: {unit.name}"


@pytest.mark.parametrize("name", MODELS)
def test_a_unit_of_anything_costs_its_elements(group: Group, name: str) -> None:
    """Bytes per kind, to the byte: nothing frozen has a gradient, nothing is stored wider."""
    plain = parity.build(MODELS[name])
    trained = [param for param in plain.parameters() if param.requires_grad]
    for stage in (0, 3):
        model = parity.build(MODELS[name])
        optimizer = _adamw(model.parameters())
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()

        report = memory_report(model)

        bytes_of = [report.params_bytes, report.gradients_bytes, report.optimizer_bytes]
        if stage == 3:
            total = torch.tensor(bytes_of)
            torch.distributed.all_reduce(total, group=group.process_group)
            bytes_of = total.tolist()
        assert bytes_of == [
            sum(param.nbytes for param in plain.parameters()),
            sum(param.nbytes for param in trained),
            sum(2 * param.nbytes for param in trained),
        ], f"{name}, stage {stage}: {report}"


# ---- What a param group may contain ----


def _with_empty_group(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [], "lr": 0.5},
        {"params": list(model.parameters())},
        {"params": [], "lr": 0.1},
    ]


def _with_frozen_group(model: nn.Module) -> list[dict[str, Any]]:
    frozen = [param for param in model.parameters() if not param.requires_grad]
    trained = [param for param in model.parameters() if param.requires_grad]
    return [{"params": frozen, "weight_decay": 0.3}, {"params": trained, "lr": 0.03}]


def _without_frozen(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [param for param in model.parameters() if param.requires_grad]}]


def _without_some_trained(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model[1].parameters())}, {"params": list(model[2].parameters())}]


GROUPS = {
    "empty": _with_empty_group,
    "all-frozen": _with_frozen_group,
    "without-the-frozen": _without_frozen,
    "without-some-that-train": _without_some_trained,
}


@pytest.mark.parametrize("groups", GROUPS)
def test_param_groups_keep_their_place(group: Group, groups: str) -> None:
    """A scheduler finds its groups by position, also those in which nothing is left to train."""

    def make() -> nn.Module:
        return _freeze(_plain_blocks(), 1)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        groups = [(entry["lr"], len(entry["params"])) for entry in optimizer.param_groups]
        return [*_train(model, optimizer), groups]

    configs = map(ZeroConfig, parity.STAGES)
    for model, _ in assert_trains_as_plain(
        group, make, run, *configs, make_optimizer=lambda model: _adamw(GROUPS[groups](model))
    ):
        zero_engine.clip_grad_norm_(model, 1.0)  # of nothing: there are no gradients now


# ---- Models with nothing to train, or nothing at all ----


@pytest.mark.parametrize("stage", parity.STAGES)
def test_a_model_without_a_trained_parameter_evaluates(group: Group, stage: int) -> None:
    """A frozen teacher is sharded for its size alone, and a part of a model may have no size."""
    x = torch.randn(4, 3)
    teacher = _plain_blocks().requires_grad_(False)
    plain = copy.deepcopy(teacher)
    zero_engine.shard(teacher, None, ZeroConfig(stage), group=group)
    assert equal(teacher(x), plain(x))
    assert equal(teacher(x), plain(x))
    report = memory_report(teacher)
    assert report.gradients_bytes + report.optimizer_bytes + report.reduction_bytes == 0

    nothing = nn.Sequential(nn.Flatten(), nn.ReLU())
    zero_engine.shard(nothing, None, ZeroConfig(stage), group=group)
    assert equal(nothing(x), x.relu())
    assert zero_engine.full_state_dict(nothing) == {}
    assert memory_report(nothing).total_bytes == 0
