"""Unscaling, clipping and skipping in the kernels of torch's fused optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._sharded_model import ShardedModel

# NOTE(in_step): torch's fused optimizers divide gradients by their attribute `grad_scale` and leave
# everything as it is where `found_inf` is not 0, both read on the device; GradScaler uses the same.
# Their first step creates state, SGD's momentum uninitialised: that one must not be skipped so.


def can_clip_in_step(sharded: ShardedModel) -> bool:
    """Whether the optimizer's next step can do it. Local, equal on all ranks."""
    optimizer = sharded.optimizer
    return sharded.has_stepped and getattr(optimizer, "_step_supports_amp_scaling", False)


def leave_to_step(sharded: ShardedModel, finite: Tensor, *, divisor: Tensor | None) -> None:
    """Have the next step divide gradients, or leave everything as it is if not `finite`. Local."""
    optimizer: Any = sharded.optimizer
    optimizer.grad_scale = None if divisor is None else divisor.to(torch.float32)
    optimizer.found_inf = sharded.left_to_step = finite.logical_not().to(torch.float32)


def take_back(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """What was left to the next step is done, or dropped with its gradients. Local.

    What somebody else has left, as GradScaler does, is theirs to take back.
    """
    left, sharded.left_to_step = sharded.left_to_step, None
    if left is not None and getattr(optimizer, "found_inf", None) is left:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
