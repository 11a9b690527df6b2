"""Norms of gradients that leave the device are those of what is stepped, whoever wrote to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero_engine
from residences import Blocks, Cell, cpu_adam, sharded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zero_comm import Group, all_gather_json
from zero_comm.testing import assert_close
from zero_engine import Offload, ZeroConfig
from zero_partition.seams import find_sharded


def _in_cpp(grad: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        grad.mul_(2)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "nobody": lambda grad: None,
    "in place": lambda grad: grad.mul_(2),
    "data": lambda grad: grad.data.mul_(2),
    "numpy": lambda grad: grad.numpy().fill(1),
    "foreach": lambda grad: torch._foreach_mul_([grad], 2.0),
    "a kernel in C++": _in_cpp,
    "grad scaler": lambda grad: torch._amp_foreach_non_finite_check_and_unscale_(
        [grad], torch.zeros(1), torch.ones(()) / 2
    ),
}


@pytest.mark.parametrize("num_backwards", [1, 2])
@pytest.mark.parametrize("how", WRITES)
def test_a_norm_is_that_of_what_is_stepped(tmp_path: Path, how: str, num_backwards: int) -> None:
    """It is taken while a gradient is on its way; users write later, and backwards add."""
    cell = Cell(2, "disk", residence="poisoned")
    with sharded(Group.solo(), cell, str(tmp_path), make=Blocks, make_optimizer=cpu_adam) as (
        model,
        optimizer,
    ):
        for micro in range(num_backwards):
            parity.loss_of(model, parity.batch(0, micro, 0)).backward()
        grads = [
            param.grad
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        for grad in grads:
            WRITES[how](grad)

        found = zero_engine.clip_grad_norm_(model, 1e9)

        expected = torch.cat([torch.flatten(grad * 1).double() for grad in grads]).norm()
        assert_close(found.double(), expected)
        optimizer.zero_grad()


class Again(Blocks):
    """Its first block runs twice, each time with a backward of its own inside the model's."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(b, t) tokens to (b, t, words) logits."""
        first, second = self.blocks
        x = checkpoint(first, self.embed(tokens) + self.frozen, use_reentrant=True)
        x = checkpoint(first, second(x), use_reentrant=True)
        return self.head(x).float()


def test_a_norm_is_that_of_all_calls_of_a_block(tmp_path: Path) -> None:
    """The first call's gradient is measured on its way; the second call's is added to it."""
    cell = Cell(2, "disk", residence="poisoned")
    with sharded(Group.solo(), cell, str(tmp_path), make=Again, make_optimizer=cpu_adam) as (
        model,
        optimizer,
    ):
        parity.loss_of(model, parity.batch(0, 0, 0)).backward()
        plain = parity.build(Again)
        parity.loss_of(plain, parity.batch(0, 0, 0)).backward()

        found = zero_engine.clip_grad_norm_(model, 1e9)

        assert_close(found.float(), nn.utils.clip_grad_norm_(plain.parameters(), 1e9).float())
        optimizer.zero_grad()


def test_a_norm_is_kept_until_somebody_writes(tmp_path: Path) -> None:
    """Else all gradients are read again from where they rest."""
    cell = Cell(2, "disk", residence="poisoned")
    with sharded(Group.solo(), cell, str(tmp_path), make=Blocks, make_optimizer=cpu_adam) as (
        model,
        optimizer,
    ):
        parity.loss_of(model, parity.batch(0, 0, 0)).backward()
        reducer = find_sharded(model).reducer

        norms = [
            g.norm_of(at)
            for g in reducer.gradients
            for at, part in enumerate(g.parts)
            if part.numel() and g.stepped_params[at].grad is not None
        ]

        assert norms and None not in norms
        optimizer.zero_grad()


def test_one_gradient_may_be_written_of_many_that_are_on_the_host(group: Group) -> None:
    """Its norm is of the host then, and those of the others are of the device."""
    model = parity.build(Blocks)
    optimizer = parity.adamw(model)
    config = ZeroConfig(2, min_unit_bytes=0, offload=Offload(optimizer="host"))
    zero_engine.shard(model, optimizer, config, group=group)
    parity.loss_of(model, parity.batch(0, 0, group.rank)).backward()
    shards = [param for each in optimizer.param_groups for param in each["params"]]
    one = next(shard for shard in shards if shard.numel() and shard.grad is not None)
    one.grad.mul_(2)  # and no other is looked at, which may be a write

    found = zero_engine.clip_grad_norm_(model, 1e9)

    grads = [param.grad for param in shards if param.grad is not None]
    own = sum(grad.double().square().sum().item() for grad in grads)
    expected = sum(all_gather_json(own, group=group)) ** 0.5
    assert_close(found.cpu().double(), torch.tensor(expected, dtype=torch.float64, device="cpu"))
