"""Global gradient norm and clipping over shards."""

from __future__ import annotations

import torch
from torch import Tensor
from zero_comm import all_gather_flat

from ._errors import StateError
from ._sharded_model import ShardedModel
from ._torch_compat import plain_access


def clip_grad_norm_(sharded: ShardedModel, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
    """What the public `clip_grad_norm_` documents, arithmetic included."""
    if norm_type not in (2.0, float("inf")):
        raise StateError(f"expected norm_type 2 or inf, got {norm_type}")
    group, reducer = sharded.group, sharded.reducer
    sharded.refuse_incomplete_gradients("clip_grad_norm_()")
    with plain_access():
        reducer.before_step()
    sharded.take_gradients()
    grads = [
        param.grad.as_subclass(Tensor)
        for g in reducer.gradients
        for param in g.targets
        if param.grad is not None
    ]
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
    if norm_type == 2.0:
        norm = norm.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale)
    return norm.to(torch.float32)
