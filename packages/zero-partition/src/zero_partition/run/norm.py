"""Global gradient norm, unscaling and clipping over shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from zero_comm import AnyRanks, Group, collective

from zero_partition.dtensors import local_of
from zero_partition.errors import StateError
from zero_partition.plan.stages import shown
from zero_partition.stand_in import ParamShard, StateKind
from zero_partition.torch_private import foreach_mul_, foreach_norm, plain_access

from .gradients import GradientReducer
from .hooks import find_sharded, require_sharded
from .sharded_model import ModelPhase, ShardedModel, find_param_ref, param_ref_of

# NOTE(in_step): torch's fused optimizers divide gradients by their attribute `grad_scale`, and
# change nothing if `found_inf` is not 0. They read both on the device, as GradScaler sets them.
# Their first step must not be skipped so: it creates state, of which SGD's momentum stays
# uninitialised.


@frozen
class GradientReport:
    """Norm and finiteness of all gradients together, before the optimizer steps."""

    # Norm of the unscaled gradients before clipping, a float32 scalar.
    norm: Tensor
    # Whether no element on any rank is inf or nan, a bool scalar.
    finite: Tensor
    # Whether the optimizer's next step unscales, clips and skips by itself.
    is_in_step: bool = False

    @property
    def is_finite(self) -> bool:
        """Return `finite` as a bool of the host, which on CUDA waits for the device."""
        return bool(self.finite)


# A sharded model; its optimizer; or some of its parameters: a module in it, a tensor, or several.
Sharded = nn.Module | torch.optim.Optimizer | Tensor | Iterable[Tensor]


@collective
def clip_grad_norm_(
    model_or_optimizer: Sharded,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    across: Group | None = None,
    stages: AnyRanks | None = None,
) -> Tensor:
    """Scale all gradients so that their norm, over all parameters and ranks, is `max_norm` at most.

    Collective at stages 1 to 3, and at stage 0 with groups; after backward, before the step.
    The arithmetic, so that one process can repeat it: the norm of each rank's part of each
    parameter, in the gradient's dtype or, if that has 16 bits, in float32, in the order of units;
    their squares added in float64; those sums added in rank order; the square root; then every
    gradient times min(1, max_norm / (norm + 1e-6)), as torch does. Of another order p, their p-th
    powers, and the p-th root.

    Args:
        model_or_optimizer: Either of the two that were sharded together, for all gradients; or some
            parameters, of the model or of the optimizer's groups, or a module in the model, for
            theirs alone, as torch's function does. Every rank names the same ones.
        max_norm: The largest norm allowed.
        norm_type: Any order that torch takes, infinities too, but 0.
        error_if_nonfinite: A norm that is infinite or NaN is torch's RuntimeError, on every rank
            and before any gradient is changed; else gradients are scaled by it, as torch does.
        foreach: Accepted as torch has it, and without effect: there is one way here.
        across: The model-parallel group over which the model is split besides, whose ranks' norms
            are combined too; the mesh of its DTensors when None. A parameter that is marked as
            Megatron's are (`tensor_model_parallel` or `model_parallel` is true), and a DTensor that
            is sharded, counts on each of its ranks, any other on the first.
        stages: Ranks of a pipeline, each of which has other layers: all of their parameters count.

    Returns:
        The norm before clipping: a float32 scalar on the group's device, equal on all ranks.

    Raises:
        StateError: Not sharded, or `norm_type` is 0 or NaN.
        RuntimeError: See `error_if_nonfinite`.
    """
    sharded, chosen = _chosen(model_or_optimizer, "clip_grad_norm_()")
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not norm_type or math.isnan(norm_type):
        raise StateError(
            f"expected norm_type to be the order of a norm, such as 2, 1 or inf, got {norm_type}"
        )
    across = sharded.routes.parts if across is None else across
    grads = _gradients(sharded, "clip_grad_norm_()", across, chosen)
    sharded.compare_launches("reading the norm", at_once=True)
    norm = _total_norm(sharded, grads, norm_type, (across, stages))
    # Torch raises its own error. The norm is equal on all ranks, so that all of them raise.
    if error_if_nonfinite:
        nn.utils.get_total_norm([norm], norm_type, error_if_nonfinite=True)
    _scale_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm.to(torch.float32)


@collective
def clip_grad_value_(
    model_or_optimizer: Sharded,
    clip_value: float,
    foreach: bool | None = None,
) -> None:
    """Clamp every element of all gradients to [-clip_value, clip_value], as torch's does.

    After backward, before the step. Local, but that it reduces what `no_sync` has left.

    Args:
        model_or_optimizer: As for `clip_grad_norm_`.
        clip_value: The largest size of an element.
        foreach: Accepted as torch has it, and without effect.

    Raises:
        StateError: Not sharded, or an exception ended the backward.
    """
    sharded, chosen = _chosen(model_or_optimizer, "clip_grad_value_()")
    for grad in _gradients(sharded, "clip_grad_value_()", None, chosen):
        grad.tensor.clamp_(-float(clip_value), float(clip_value))


@collective
def unscale_and_clip_(
    model_or_optimizer: nn.Module | torch.optim.Optimizer,
    *,
    scale: float = 1.0,
    max_norm: float | None = None,
    across: Group | None = None,
    stages: AnyRanks | None = None,
    in_step: bool = False,
) -> GradientReport:
    """Divide all gradients by the loss scale and clip their norm, in one pass, if they are finite.

    Collective at stages 1 to 3, and at stage 0 with groups; after backward, before the step.
    Where any element on any rank is
    inf or nan, gradients are left as they are, on every rank: skip the step and drop them. The
    norm is that of `clip_grad_norm_`, of gradients divided by `scale`; the one factor is
    min(1, max_norm / (norm + 1e-6)) / scale.

    Args:
        model_or_optimizer: Either of the two that were sharded together.
        scale: What the loss was multiplied by.
        max_norm: The largest norm allowed; no clipping when None.
        across: As for `clip_grad_norm_`.
        stages: As for `clip_grad_norm_`.
        in_step: Leave it to the optimizer's next step, if that is one of torch's fused ones
            (`fused=True`) and has stepped before: its kernels unscale and clip on the way, and
            change nothing where gradients are not finite. `report.is_in_step` says whether it is:
            then call `optimizer.step()` in any case, and no host waits for the device.

    Raises:
        StateError: Not sharded, `scale` is not above 0, or an exception ended the backward.
    """
    sharded, chosen = _chosen(model_or_optimizer, "unscale_and_clip_()")
    if not 0 < scale < float("inf"):
        raise StateError(f"unscale_and_clip_(): expected a finite scale above 0, got {scale}")
    across = sharded.routes.parts if across is None else across
    grads = _gradients(sharded, "unscale_and_clip_()", across, chosen)
    sharded.compare_launches("reading the norm", at_once=True)
    norm = _total_norm(sharded, grads, 2.0, (across, stages)) / scale
    finite, factor = norm.isfinite(), torch.ones_like(norm)
    if max_norm is not None:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    is_scaled = scale != 1.0 or max_norm is not None
    optimizer: Any = sharded.optimizer
    can_leave_it = getattr(optimizer, "_step_supports_amp_scaling", False) and sharded.has_stepped
    if in_step and can_leave_it:  # see NOTE(in_step)
        optimizer.grad_scale = (scale / factor).to(torch.float32) if is_scaled else None
        optimizer.found_inf = finite.logical_not().to(torch.float32)
        sharded.note_found_inf(optimizer.found_inf)
        return GradientReport(norm.to(torch.float32), finite, is_in_step=True)
    # No branch on `finite`: the host would wait for the device.
    if is_scaled:
        _scale_(grads, torch.where(finite, factor / scale, 1.0))
    return GradientReport(norm.to(torch.float32), finite)


@frozen(eq=False)
class _Grad:
    """One gradient that the optimizer reads."""

    tensor: Tensor
    # False where another rank has the same gradient and adds it to the norm.
    counts: bool
    # Norm of order 2 from when it was offloaded; None if there is none, or it is out of date.
    norm: Tensor | None


def _chosen(given: Sharded, what: str) -> tuple[ShardedModel, set[int] | None]:
    """Return the model, and ids of parameters or of their shards; None for all."""
    if isinstance(given, nn.Module):
        is_part = find_sharded(given) is None and any(map(find_param_ref, given.parameters()))
        if not is_part:
            return require_sharded(given), None
        given = given.parameters()
    elif isinstance(given, torch.optim.Optimizer):
        sharded = require_sharded(given)
        if sharded.optimizer is given:
            return sharded, None
        return sharded, {id(param) for group in given.param_groups for param in group["params"]}
    if not isinstance(given, Tensor | Iterable):
        raise StateError(
            f"{what}: expected a sharded model, its optimizer or some of its parameters first, got "
            f"{shown(given)}"
        )
    params = [given] if isinstance(given, Tensor) else list(given)
    owners = [
        param.sharded() if isinstance(param, ParamShard) else param_ref_of(param, what=what).sharded
        for param in params
    ]
    if not owners or owners[0] is None or any(owner is not owners[0] for owner in owners):
        raise StateError(
            f"{what}: expected parameters of one sharded model, got {len(params)} of "
            f"{len(set(map(id, owners)))}; call it for each model, on every rank"
        )
    return owners[0], {id(local_of(param)) for param in params}


def _gradients(
    sharded: ShardedModel, what: str, across: Group | None, chosen: set[int] | None = None
) -> list[_Grad]:
    sharded.require(what, StateKind.GRADS, no=(ModelPhase.BACKWARD, ModelPhase.FAILED))
    with plain_access():
        sharded.reducer.before_step()
    sharded.take_gradients()
    counts_all = across is None or across.rank == 0
    has_own_ranks = bool(sharded.routes.of_groups) and not sharded.shards_state
    with plain_access():
        return [
            _Grad(
                target.grad.as_subclass(Tensor),
                (counts_all or _is_split(param)) and not (has_own_ranks and g.routes.whole.rank),
                g.norm_of(position),
            )
            for g in sharded.reducer.gradients
            for position, (target, param) in enumerate(
                zip(g.stepped_params, g.buffer.params, strict=True)
            )
            if target.grad is not None and target.grad.numel()
            if chosen is None or id(target) in chosen or id(param) in chosen
        ]


def _is_split(param: nn.Parameter) -> bool:
    """Return whether Megatron marks it as split over the ranks of a model-parallel group."""
    return any(getattr(param, mark, False) for mark in ("tensor_model_parallel", "model_parallel"))


def _total_norm(
    sharded: ShardedModel,
    grads: Sequence[_Grad],
    norm_type: float,
    others: Sequence[AnyRanks | None],
) -> Tensor:
    """Return the norm over all ranks: a float64 scalar, equal on all of them. Collective."""
    reducer = sharded.reducer
    is_sum = math.isfinite(norm_type)
    neutral = math.inf if norm_type == -math.inf else 0.0
    local = torch.full((1,), neutral, dtype=torch.float64, device=sharded.group.device)
    if grads:
        parts = _norms_of(grads, norm_type)
        # Cached norms are on the device; of gradients modified on the host they are on the host.
        if len({part.device for part in parts}) > 1:
            parts = [part.to(sharded.group.device) for part in parts]
        norms = torch.stack(parts).to(torch.float64)
        powers = norms.pow(norm_type) if is_sum else norms.clone()
        for i, grad in enumerate(grads):
            # Another rank adds it. Times 0 it is neutral, but for inf and nan, which give nan.
            if not grad.counts:
                powers[i] = 0 * norms[i] + neutral
        extreme = powers.max() if norm_type > 0 else powers.min()
        # If gradients are on the host, the copy does not wait for earlier work of the device.
        local[0].copy_(powers.sum() if is_sum else extreme, non_blocking=True)
    if reducer.shards_state or sharded.routes.of_groups:
        local = _combine(local, norm_type, sharded.group, reducer)
    for ranks in others:
        if ranks is not None:
            local = _combine(local, norm_type, Group.of(ranks), reducer)
    if norm_type == 2.0:
        return local[0].sqrt()
    return local[0].pow(1 / norm_type) if is_sum else local[0]


def _norms_of(grads: Sequence[_Grad], norm_type: float) -> list[Tensor]:
    """Return the norm of each gradient; of 16-bit ones in float32, since fp16 overflows.

    Cached norms, of order 2, are not computed again.
    """
    norms = [grad.norm for grad in grads]
    missing = [i for i, norm in enumerate(norms) if norm is None or norm_type != 2.0]
    tensors = [grads[i].tensor for i in missing]
    for dtype, among in _by_dtype(tensors).items():
        positions = [missing[i] for i in among]
        same = [tensors[i] for i in among]
        wide = torch.float32 if dtype.itemsize < torch.float32.itemsize else None
        for i, norm in zip(positions, foreach_norm(same, norm_type, dtype=wide), strict=True):
            norms[i] = norm
    return [norm for norm in norms if norm is not None]


def _scale_(grads: Sequence[_Grad], factor: Tensor) -> None:
    """Multiply all of them in place. A factor of their own dtype makes it one kernel on CUDA."""
    tensors = [grad.tensor for grad in grads]
    factor = factor.to(tensors[0].device) if tensors else factor
    for dtype, positions in _by_dtype(tensors).items():
        # In 16 bits the factor would be rounded.
        is_wide = dtype.itemsize >= torch.float32.itemsize
        foreach_mul_([tensors[i] for i in positions], factor.to(dtype) if is_wide else factor)


def _by_dtype(grads: Sequence[Tensor]) -> dict[torch.dtype, list[int]]:
    positions: dict[torch.dtype, list[int]] = {}
    for i, grad in enumerate(grads):
        positions.setdefault(grad.dtype, []).append(i)
    return positions


def _combine(local: Tensor, norm_type: float, group: Group, reducer: GradientReducer) -> Tensor:
    """Combine one number of each rank, in rank order: sum, or for infinite orders the extreme."""
    if group.world_size == 1:
        return local
    total, *others = reducer.launch_exchange(local, group).wait().split(1)
    for part in others:
        if math.isfinite(norm_type):
            total += part
        else:
            total = (torch.maximum if norm_type > 0 else torch.minimum)(total, part)
    return total
