"""Gradients that are summed over the ranks, each of them once, however many backwards there are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import assert_close
from zero_engine import Precision
from zero_partition import StateError

NUM_MICRO_BATCHES = 3
SUM = Precision(masters=None, reduces_mean=False)
each_sum = pytest.mark.parametrize(
    "precision", [SUM, Precision(masters=None, mean_over=1.0)], ids=["sum", "mean over one"]
)


@each_sum
@pytest.mark.parametrize(
    ("stage", "reduces_once"),
    [(0, True), *((stage, once) for stage in (1, 2, 3) for once in (True, False))],
)
def test_every_micro_batch_counts_once(
    group: Group, stage: int, reduces_once: bool, precision: Precision
) -> None:
    """Who sums has chosen the learning rate for the sum; a factor more is another training."""
    model, optimizer = _build()
    zero_engine.shard(model, optimizer, ZeroConfig(stage, precision=precision), group=group)
    for step in range(2):
        for micro in range(NUM_MICRO_BATCHES):
            waits = reduces_once and micro + 1 < NUM_MICRO_BATCHES
            with zero_engine.no_sync(model) if waits else nullcontext():
                _backward(model, step, micro, group.rank)
        optimizer.step()
        optimizer.zero_grad()

    _assert_trained(model, group, num_micro_batches=NUM_MICRO_BATCHES)


def _once_more(model: nn.Module, rank: int) -> None:
    _backward(model, 0, 1, rank)


def _without_batch(model: nn.Module, rank: int) -> None:
    if rank == 0:
        _backward(model, 0, 1, rank)
    else:
        zero_engine.backward_without_batch(model)


def _in_no_sync(model: nn.Module, rank: int) -> None:
    with zero_engine.no_sync(model):
        _backward(model, 0, 1, rank)


@each_sum
@pytest.mark.parametrize("again", [_once_more, _without_batch, _in_no_sync])
def test_what_stage_0_has_summed_is_not_summed_again(
    group: Group, again: Callable[[nn.Module, int], None], precision: Precision
) -> None:
    """The sum lies where autograd adds the next gradient, and would count once for each rank."""
    model, optimizer = _build()
    zero_engine.shard(model, optimizer, ZeroConfig(0, precision=precision), group=group)
    _backward(model, 0, 0, group.rank)
    with pytest.raises(StateError, match=r"parameter '.+': its gradient was summed .* no_sync"):
        again(model, group.rank)

    optimizer.zero_grad()
    for step in range(2):
        _backward(model, step, 0, group.rank)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step > 0)

    _assert_trained(model, group, num_micro_batches=1)


def test_asking_for_a_gradient_sums_nothing(group: Group) -> None:
    """torch.autograd.grad() gives each rank its own gradients, between backward and step too."""
    model, optimizer = _build()
    zero_engine.shard(model, optimizer, ZeroConfig(0, precision=SUM), group=group)
    for step in range(2):
        _backward(model, step, 0, group.rank)
        loss = parity.loss_of(model, parity.batch(step, 0, group.rank))
        torch.autograd.grad(loss, model.scale)
        optimizer.step()
        model.zero_grad()

    _assert_trained(model, group, num_micro_batches=1)


def _build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = parity.build(parity.tiny_float32)
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.1)


def _backward(model: nn.Module, step: int, micro: int, rank: int) -> None:
    parity.loss_of(model, parity.batch(step, micro, rank)).backward()


def _assert_trained(model: nn.Module, group: Group, *, num_micro_batches: int) -> None:
    """As one process trains that adds every rank's gradients up."""
    plain, optimizer = _build()
    for step in range(2):
        for rank in range(group.world_size):
            for micro in range(num_micro_batches):
                _backward(plain, step, micro, rank)
        optimizer.step()
        optimizer.zero_grad()
    whole: dict[str, Tensor] = zero_engine.full_state_dict(model)
    if group.rank == 0:
        assert_close(whole, dict(plain.state_dict()))
