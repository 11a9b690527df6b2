"""Global gradient norm, unscaling and clipping over shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor
from zero_comm import all_gather_flat

from ._errors import StateError
from ._sharded_model import ShardedModel
from ._torch_compat import plain_access


@frozen
class GradientReport:
    """What is known of all gradients together, before the optimizer steps."""

    norm: Tensor  # float32 scalar: of the unscaled gradients, before clipping
    is_finite: bool  # whether no element on any rank is inf or nan


def clip_grad_norm_(sharded: ShardedModel, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
    """What the public `clip_grad_norm_` documents, arithmetic included."""
    if norm_type not in (2.0, float("inf")):
        raise StateError(f"expected norm_type 2 or inf, got {norm_type}")
    grads = _gradients(sharded, "clip_grad_norm_()")
    norm = _total_norm(sharded, grads, norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor)
    return norm.to(torch.float32)


def unscale_and_clip_(
    sharded: ShardedModel, *, scale: float = 1.0, max_norm: float | None = None
) -> GradientReport:
    """What the public `unscale_and_clip_` documents."""
    if not 0 < scale < float("inf"):
        raise StateError(f"unscale_and_clip_(): expected a finite scale above 0, got {scale}")
    grads = _gradients(sharded, "unscale_and_clip_()")
    norm = _total_norm(sharded, grads, 2.0) / scale
    if not norm.isfinite():
        return GradientReport(norm.to(torch.float32), is_finite=False)
    factor = torch.ones_like(norm)
    if max_norm is not None:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if scale != 1.0 or max_norm is not None:
        for grad in grads:
            grad.mul_(factor / scale)
    return GradientReport(norm.to(torch.float32), is_finite=True)


def _gradients(sharded: ShardedModel, what: str) -> list[Tensor]:
    """Those that the optimizer reads, as plain tensors, once all are there."""
    sharded.refuse_incomplete_gradients(what)
    with plain_access():
        sharded.reducer.before_step()
    sharded.take_gradients()
    return [
        param.grad.as_subclass(Tensor)
        for g in sharded.reducer.gradients
        for param in g.targets
        if param.grad is not None
    ]


def _total_norm(sharded: ShardedModel, grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """Over all ranks: a float64 scalar, equal on all of them. Collective."""
    group, reducer = sharded.group, sharded.reducer
    norms = [torch.linalg.vector_norm(grad, norm_type) for grad in grads if grad.numel()]
    local = torch.zeros(1, dtype=torch.float64, device=group.device)
    if norms:
        stacked = torch.stack([norm.to(torch.float64) for norm in norms])
        local[0] = stacked.max() if norm_type != 2.0 else stacked.square().sum()
    if reducer.shards_state and group.world_size > 1:
        total = local.new_zeros(group.world_size)
        splits = [1] * group.world_size
        handle = all_gather_flat(
            total, splits=splits, group=group, shard=local, tag=reducer.control_tag, control=True
        )
        parts = handle.wait().unbind()
    else:
        parts = local.unbind()
    norm = parts[0]
    for part in parts[1:]:
        norm = torch.maximum(norm, part) if norm_type != 2.0 else norm + part
    return norm.sqrt() if norm_type == 2.0 else norm
