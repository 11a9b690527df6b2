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


def leave_to_step(optimizer: Any, finite: Tensor, *, divisor: Tensor | None) -> None:
    """Have the next step divide gradients, or leave everything as it is if not `finite`. Local."""
    optimizer.grad_scale = None if divisor is None else divisor.to(torch.float32)
    optimizer.found_inf = finite.logical_not().to(torch.float32)


def take_back(optimizer: torch.optim.Optimizer) -> None:
    """What was left to the next step is done, or dropped with its gradients. Local."""
    vars(optimizer).pop("grad_scale", None)
    vars(optimizer).pop("found_inf", None)
