"""Optimizers that evaluate a closure: once, several times, at other weights than they end at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import assert_close
from zero_engine import Offload


class _LooksAhead(torch.optim.Optimizer):
    """Steps aside, takes the gradient there, and steps from where it was: extragradient, SAM."""

    def __init__(self, params: Any, *, back: str) -> None:
        super().__init__(params, {"lr": 0.05})
        self.back = back

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [param.clone() for param in trained]
        for param in trained:
            param.add_(param.grad, alpha=0.5)
        with torch.enable_grad():
            closure()
        for param, value in zip(trained, before, strict=True):
            if self.back == "data":
                param.data = value
            else:
                param.copy_(value)
            param.add_(param.grad, alpha=-0.05)
        return loss


# Not "data" at stage 0, where parameters are the user's own: DDP would lose its views as well.
@pytest.mark.parametrize(
    ("back", "stage"),
    [("copy", stage) for stage in parity.STAGES] + [("data", stage) for stage in (1, 2, 3)],
)
def test_a_gradient_taken_at_other_weights_is_that_of_ddp(
    group: Group, stage: int, back: str
) -> None:
    """The second forward must read what the optimizer wrote, on every rank."""
    curves = []
    for way in ("ddp", "sharded"):
        model: nn.Module = parity.build()
        trainable = [param for param in model.parameters() if param.requires_grad]
        optimizer = _LooksAhead(trainable, back="copy" if way == "ddp" else back)
        if way == "ddp":
            model = parity.as_ddp(model, group)
        else:
            zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
        evaluate = partial(_evaluate, model, optimizer, group.rank)
        losses = [optimizer.step(partial(evaluate, number)).item() for number in range(3)]
        curves.append(losses)

    assert curves[0] == curves[1]


def _evaluate(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> Tensor:
    optimizer.zero_grad()
    loss = parity.loss_of(model, parity.batch(number, 0, rank))
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("place", "stage"),
    [*(("device", stage) for stage in parity.STAGES), *(("host", stage) for stage in (1, 2, 3))],
)
def test_a_layer_that_is_thawed_before_a_closure_trains_in_it(
    group: Group, place: str, stage: int
) -> None:
    """The model is laid out anew in the closure's forward, in the middle of a step."""
    curves = []
    for way in ("ddp", "sharded"):
        model: nn.Module = parity.build()
        up = model.blocks[1].up.requires_grad_(False)
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.NAdam([*params, *up.parameters()], lr=0.01)
        if way == "sharded":
            offload = Offload(optimizer="host") if place == "host" else None
            config = ZeroConfig(stage, min_unit_bytes=0, offload=offload)
            zero_engine.shard(model, optimizer, config, group=group)
        losses = []
        for number in range(4):
            if number == 2:
                up.requires_grad_(True)
            # Another DDP, as one keeps the parameters that required gradients when it was made.
            of = parity.as_ddp(model, group) if way == "ddp" else model
            evaluate = partial(_evaluate, of, optimizer, group.rank)
            losses.append(optimizer.step(partial(evaluate, number)).item())
        curves.append(losses)

    # A device's optimizer rounds in another order than the host's.
    assert_close(curves[0], curves[1], rtol=1e-3, atol=1e-3)
