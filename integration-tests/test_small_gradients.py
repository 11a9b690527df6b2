"""Thousands of small parameters: their gradients wait for each other, and each costs one call."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import parity
import pytest
import torch
import zero_engine
import zero_partition
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import equal
from zero_engine import ZeroConfig  # small blocks stay together, as users have it

PACKAGE = str(Path(inspect.getfile(zero_partition)).parent)
MAX_WAITING = 64  # what docs/decisions/small-gradients-wait.md promises


class _Tiny(nn.Module):
    """Small layers around a large one; one that nobody uses, and one that is used twice."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(3, 3) for _ in range(num_layers))
        self.up, self.down = nn.Linear(3, 2000), nn.Linear(2000, 3)
        self.unused = nn.Linear(3, 3)
        self.after = nn.ModuleList(nn.Linear(3, 3) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.before:
            x = x + 0.1 * torch.tanh(layer(x))
        x = x + self.down(torch.relu(self.up(x)))
        for layer in (self.before[0], *self.after):
            x = x + 0.1 * torch.tanh(layer(x))
        return x


def _build(num_layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = _Tiny(num_layers)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def _loss(model: nn.Module, seed: int) -> Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


@pytest.mark.parametrize("stage", parity.STAGES)
def test_small_gradients_that_wait_add_up_to_those_of_one_process(group: Group, stage: int) -> None:
    """Whatever arrives, and however often before a step, none may be lost or counted twice."""
    alone, alone_optimizer = _build(40)
    model, optimizer = _build(40)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    for step in range(3):
        for micro in range(2):  # every rank has the same batch, so that the mean is that of one
            seed = 2 * step + micro
            _loss(alone, seed).backward()
            _loss(model, seed).backward()
        for each in (alone_optimizer, optimizer):
            each.step()
            each.zero_grad()
    weights = zero_engine.full_state_dict(model)
    for name, expected in alone.state_dict().items() if group.rank == 0 else ():
        assert equal(weights[name], expected), f"stage {stage}, {name}"


@pytest.mark.ranks(1, 2)
def test_few_gradients_wait_at_a_time(group: Group) -> None:
    """What waits lives twice, here and in the buffer: it must not grow with the unit."""
    model, optimizer = _build(200)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    params, waiting = list(model.parameters()), []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            waiting.append(sum(param.grad is not None for param in params))
            return grad

    for layer in (*model.before, *model.after):
        layer.register_forward_hook(lambda module, args, output: Look.apply(output))
    _loss(model, 0).backward()

    assert len(waiting) >= 400
    assert 1 < max(waiting) <= MAX_WAITING


# ---- What a hook costs ----


@pytest.mark.parametrize("stage", parity.STAGES)
def test_a_small_parameter_costs_one_call(stage: int) -> None:
    """A call is what a tiny layer notices; time itself is for benchmarks/run.py hooks."""
    few, many = (_count_calls(num_layers, stage) for num_layers in (100, 300))

    num_params = 2 * 2 * 200
    assert (many - few) / num_params < 1.25


def _count_calls(num_layers: int, stage: int) -> int:
    model, _ = _stepped(num_layers, stage)  # the first backward settles an order
    return _count("call", lambda: _loss(model, 1).backward())


def test_sharding_looks_at_each_small_module_a_few_times() -> None:
    """It took 25 s for 2,000 tiny modules while each of them looked at all the others."""
    few, many = (_count_planning(num_layers) for num_layers in (50, 200))

    assert many / few < 4.5  # 4, were there nothing but these layers


def _count_planning(num_layers: int) -> int:
    model, optimizer = _build(num_layers)
    return _count("call", lambda: zero_engine.shard(model, optimizer, ZeroConfig(3)), within="")


@pytest.mark.parametrize("stage", parity.STAGES)
def test_a_step_of_four_times_the_parameters_is_four_times_the_work(stage: int) -> None:
    """Asking at each arrival whether all have arrived is a square, and shows at thousands."""
    # Python 3.12 begins to trace instructions with the second tracing of a process.
    _, few, many = (_instructions_of_a_step(num_layers, stage) for num_layers in (1, 12, 48))

    assert 0 < many <= 4 * few


def _instructions_of_a_step(num_layers: int, stage: int) -> int:
    model, optimizer = _stepped(num_layers, stage)
    return _count("opcode", lambda: parity.finish_step(_loss(model, 1), optimizer))


def _stepped(num_layers: int, stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = _build(num_layers)
    zero_engine.shard(model, optimizer, ZeroConfig(stage))
    parity.finish_step(_loss(model, 0), optimizer)
    return model, optimizer


def _count(kind: str, action: Callable[[], object], *, within: str = PACKAGE) -> int:
    """Python's own calls or instructions in files of a folder: exact, whatever else runs."""
    found = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal found
        if event == "call" and not frame.f_code.co_filename.startswith(within):
            return None
        frame.f_trace_opcodes = kind == "opcode"
        found += event == kind
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(previous)
    return found


# ---- One gradient that is all of its buffer ----


class _Stacked(nn.Module):
    """Two layers of one parameter each, whose gradients are parts of one tensor of autograd's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor, keep: list[Tensor]) -> Tensor:
        both = torch.cat([layer.weight for layer in self.layers])
        both.retain_grad()
        keep.append(both)
        return torch.tanh(x @ both.T)


def test_a_gradient_that_is_not_copied_is_not_written_to_either(group: Group) -> None:
    """Autograd may give away a part of what somebody else looks at."""

    def run(model: nn.Module, kept: list[Tensor]) -> None:
        for micro in range(2):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(micro))
            model(x, kept).square().mean().backward()

    torch.manual_seed(0)
    plain = _Stacked()
    torch.manual_seed(0)
    model = _Stacked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = ("layers.0", "layers.1")
    zero_engine.shard(model, optimizer, ZeroConfig(2, units=units), group=group)
    expected: list[Tensor] = []
    found: list[Tensor] = []
    run(plain, expected)
    run(model, found)
    for ours, theirs in zip(found, expected, strict=True):
        assert equal(ours.grad, theirs.grad)
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    weights = zero_engine.full_state_dict(model)
    for name, value in plain.state_dict().items() if group.rank == 0 else ():
        assert equal(weights[name], value), name
