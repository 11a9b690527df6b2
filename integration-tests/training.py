"""Training loops that several tests share, and the comparison that they end with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import zero_engine
from torch import Tensor, nn
from zero_comm import Group
from zero_partition.seams import find_sharded


class Interrupt(torch.autograd.Function):
    """The identity, whose backward raises KeyError."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: D102
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]  # noqa: D102
        raise KeyError("interrupted")


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, int], Tensor],
    *,
    num_steps: int,
) -> list[float]:
    """The plain loop over a loss of the model and the number of the step. Returns the losses."""
    losses = []
    for step in range(num_steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def token_loss(model: nn.Module, step: int, *, rank: int) -> Tensor:
    """Of two rows of six tokens, twenty kinds of them, this rank's own; under autocast once."""
    generator = torch.Generator().manual_seed(2 * step + rank)
    ids = torch.randint(0, 20, (2, 6), generator=generator)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=step == 1):
        return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def scaled_step(
    scaler: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    *,
    max_norm: float,
) -> None:
    """One step of mixed precision: scale, unscale, clip, step."""
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    zero_engine.clip_grad_norm_(model, max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def assert_weights_of(model: nn.Module, plain: nn.Module, *, group: Group, what: str) -> None:
    """A sharded model has the weights of a plain one, bit for bit. Collective."""
    weights = zero_engine.full_state_dict(model)
    if group.rank == 0:
        parity.assert_same_weights(weights, plain.state_dict(), what=what)


def assert_trains_as_plain(
    group: Group,
    make: Callable[[], nn.Module],
    run: Callable[[nn.Module, torch.optim.Optimizer], Any],
    *configs: parity.ZeroConfig,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = parity.adamw,
    tolerance: float = 0.0,
) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """Under each configuration a loop finds what it finds in plain torch, bit for bit, and learns.

    Args:
        group: Whose ranks all see the same data, so that their mean is what one process computes.
        make: The model.
        run: The loop; returns its losses, and what else there is to compare.
        configs: Each is tried with a model of its own.
        make_optimizer: Of the model.
        tolerance: By how much the numbers that the loop finds may differ.

    Returns:
        The sharded models and their optimizers.
    """
    plain = parity.build(make)
    found = run(plain, make_optimizer(plain))
    expected = pytest.approx(found, rel=0, abs=tolerance) if tolerance else found
    trained = []
    for config in configs:
        model = parity.build(make)
        optimizer = make_optimizer(model)
        zero_engine.shard(model, optimizer, config, group=group)
        assert run(model, optimizer) == expected, str(config)
        assert_weights_of(model, plain, group=group, what=str(config))
        assert not find_sharded(model).outside.num_bytes
        trained.append((model, optimizer))
    return trained
