"""The functions users call on a partitioned model, by the objects they hold."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from zero_comm import Group, Traffic, collective

from zero_partition import report as _memory
from zero_partition import report as _schedule_report
from zero_partition.enter.hooks import find_sharded, find_sharded_by_optimizer
from zero_partition.run import norm as _norm
from zero_partition.run.sharded_model import ShardedModel
from zero_partition.run.unit import CodecErrors
from zero_partition.values import offload_states as _states
from zero_partition.values import optimizer_state_dict as _optimizer_state_dict
from zero_partition.values import state_dict as _state_dict
from zero_partition.values import unpartition as _unpartition

from .errors import StateError
from .stand_in import Backup, StateKind
from .torch_private import plain_access


@collective
def clip_grad_norm_(
    model_or_optimizer: nn.Module | torch.optim.Optimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    across: Group | None = None,
) -> Tensor:
    """Scale all gradients so that their norm, over all parameters and ranks, is `max_norm` at most.

    Collective at stages 1 to 3; after backward, before the step. The arithmetic, so that one
    process can repeat it: the norm of each rank's part of each parameter, in the gradient's dtype
    or, if that has 16 bits, in float32, in the order of units; their squares added in float64;
    those sums added in rank order; the square root; then every gradient times
    min(1, max_norm / (norm + 1e-6)), as torch does.

    Args:
        model_or_optimizer: Either of the two that were sharded together.
        max_norm: The largest norm allowed.
        norm_type: 2 or infinity.
        error_if_nonfinite: A norm that is infinite or NaN is torch's RuntimeError, on every rank
            and before any gradient is changed; else gradients are scaled by it, as torch does.
        foreach: Accepted as torch has it, and without effect: there is one way here.
        across: The model-parallel group over which the model is split besides, whose ranks' norms
            are combined too. A parameter that is marked as Megatron's are (`tensor_model_parallel`
            or `model_parallel` is true) counts on each of its ranks, any other on the first.

    Returns:
        The norm before clipping: a float32 scalar on the group's device, equal on all ranks.

    Raises:
        StateError: Not sharded, or `norm_type` is neither 2 nor infinity.
        RuntimeError: See `error_if_nonfinite`.
    """
    return _norm.clip_grad_norm_(
        _find(model_or_optimizer),
        max_norm,
        norm_type,
        error_if_nonfinite=error_if_nonfinite,
        across=across,
    )


@collective
def clip_grad_value_(
    model_or_optimizer: nn.Module | torch.optim.Optimizer,
    clip_value: float,
    foreach: bool | None = None,
) -> None:
    """Clamp every element of all gradients to [-clip_value, clip_value], as torch's does.

    After backward, before the step. Local, but that it reduces what `no_sync` has left.

    Args:
        model_or_optimizer: Either of the two that were sharded together.
        clip_value: The largest size of an element.
        foreach: Accepted as torch has it, and without effect.

    Raises:
        StateError: Not sharded, or an exception ended the backward.
    """
    _norm.clip_grad_value_(_find(model_or_optimizer), float(clip_value))


@collective
def unscale_and_clip_(
    model_or_optimizer: nn.Module | torch.optim.Optimizer,
    *,
    scale: float = 1.0,
    max_norm: float | None = None,
    across: Group | None = None,
    in_step: bool = False,
) -> _norm.GradientReport:
    """Divide all gradients by the loss scale and clip their norm, in one pass, if they are finite.

    Collective at stages 1 to 3; after backward, before the step. Where any element on any rank is
    inf or nan, gradients are left as they are, on every rank: skip the step and drop them. The
    norm is that of `clip_grad_norm_`, of gradients divided by `scale`; the one factor is
    min(1, max_norm / (norm + 1e-6)) / scale.

    Args:
        model_or_optimizer: Either of the two that were sharded together.
        scale: What the loss was multiplied by.
        max_norm: The largest norm allowed; no clipping when None.
        across: As for `clip_grad_norm_`.
        in_step: Leave it to the optimizer's next step, if that is one of torch's fused ones
            (`fused=True`) and has stepped before: its kernels unscale and clip on the way, and
            change nothing where gradients are not finite. `report.is_in_step` says whether it is:
            then call `optimizer.step()` in any case, and no host waits for the device.

    Raises:
        StateError: Not sharded, `scale` is not above 0, or an exception ended the backward.
    """
    return _norm.unscale_and_clip_(
        _find(model_or_optimizer),
        scale=scale,
        max_norm=max_norm,
        across=across,
        in_step=in_step,
    )


@collective
def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The whole model's `state_dict`, on rank 0, in host memory. Collective.

    At most one unit is whole at a time on the other ranks. Keys, buffers and extra state are what
    the model's own `state_dict` gives; tied parameters share one tensor. A delayed update comes in
    first, as by `finish_update`, so that weights and optimizer state are of one step.

    Returns:
        The state dict on rank 0, an empty dict elsewhere.

    Raises:
        StateError: Not sharded, a forward is running, or at stage 3 a state_dict hook of the model
            adds a tensor that is no parameter or buffer.
    """
    return _state_dict.full_state_dict(_find(model))


@collective
def full_optimizer_state_dict(model: nn.Module) -> dict[str, Any]:
    """The optimizer's whole `state_dict`, on rank 0, in host memory. Collective; between steps.

    In torch's format, numbered in the order of param groups: the plain optimizer over the plain
    model loads it. Where parameters have masters (`Precision(params=...)`), these are beside it
    under "masters", by the same numbers. A delayed update comes in first, as in `full_state_dict`.
    One entry of one parameter is whole at a time on the other ranks, and one unit's shard of state
    in memory that rests elsewhere.

    Returns:
        The state dict on rank 0, an empty dict elsewhere. Of a `ChainedOptimizer`, what that gives.

    Raises:
        StateError: Not sharded, or without an optimizer; a forward is running; or an entry is laid
            out so that no whole of it is known.
        zero_comm.CommError: A rank did not take part in time.
    """
    return _optimizer_state_dict.full_optimizer_state_dict(_find(model))


@collective
def load_full_optimizer_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Make a whole optimizer's `state_dict` that of a sharded optimizer. Collective; between steps.

    At any stage, residence, cut and world size, also from a plain optimizer over the plain model.
    Masters, where there are any in it, become the values of their parameters: load weights before.
    How a step is computed (`fused`, `foreach`, ...) stays. Each rank keeps a copy of its part, in
    host memory, until all of it is there.

    Args:
        model: The very module that was sharded.
        state_dict: What `full_optimizer_state_dict`, or torch's `state_dict()`, gave. Rank 0's
            counts; the others may pass {}.

    Raises:
        LoadError: On every rank: names what is missing, unexpected or does not fit; nothing was
            written.
        StateError: As for `full_optimizer_state_dict`.
        zero_comm.CommError: A rank did not take part in time.
    """
    _optimizer_state_dict.load_full_optimizer_state_dict(_find(model), state_dict)


@collective
def finish_update(model: nn.Module) -> None:
    """Let the model compute with every update that was begun. Collective, blocking; between steps.

    After an optimizer's step that is delayed the model lacks the update of that step until the
    next one. Call this after the last step, before the model is evaluated or exported; what trains
    on goes on without delay for one step. Where no update is delayed nothing happens.

    Raises:
        StateError: Not sharded, a forward is running, or a context keeps parameters whole.
        Exception: What the update has ended with; a StoreError, a TornStepError.
    """
    _find(model).finish_update()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without reducing them. Local; all ranks must do the same.

    Inside, each rank keeps whole gradients of what it ran backward on, as DistributedDataParallel
    does. The first backward after it, or the optimizer's step, reduces the sum once. Without it,
    each backward reduces and adds to the gradient shard, which needs less memory.

    Raises:
        StateError: Not sharded.
    """
    reducer = _find(model).reducer
    before, reducer.sync = reducer.sync, False
    try:
        yield
    finally:
        reducer.sync = before


@contextmanager
def coalesce_reduction(model: nn.Module) -> Iterator[None]:
    """Reduce the sum of all gradients of the backwards inside, once, on leaving. Collective there.

    For several backwards that make one step: each rank may run as many as it likes. Between them
    each rank keeps whole gradients, as under `no_sync`. After an exception nothing is reduced;
    `zero_grad()` drops what was collected.

    Raises:
        StateError: Not sharded, inside `no_sync` or itself, or an exception ended a backward.
        zero_comm.CommError: A rank did not take part in time.
    """
    sharded = _find(model)
    if not sharded.reducer.sync:
        raise StateError(
            "coalesce_reduction() inside no_sync() or another coalesce_reduction(): the outer one "
            "says when gradients are reduced; leave it first"
        )
    sharded.refuse_parked("coalesce_reduction()", StateKind.GRADS)
    with no_sync(model):
        yield
    sharded.refuse_incomplete_gradients("leaving coalesce_reduction()")
    with plain_access():
        sharded.reducer.reduce_local()


def backward_without_batch(model: nn.Module) -> None:
    """Take part in a backward of the other ranks, with gradients of zero. Collective.

    For a rank that has no batch left while others have: it calls this in place of forward and
    backward, and then steps as they do. Inside `no_sync` it does nothing. At stage 3 the others
    must be able to read this rank's memory; where they cannot, their gathers need it, so it has to
    run a batch of any kind with its loss times zero.

    Raises:
        StateError: Not sharded, or a backward of this rank is running or ended in an exception.
        zero_comm.DivergenceError: At stage 3, others gather by messages meanwhile.
    """
    _find(model).backward_without_batch()


def release_buffers(model: nn.Module) -> None:
    """Give slots and reduction buffers back until the next step needs them. Local.

    For another use of the memory between phases. A graph made before it can no longer run backward.

    Raises:
        StateError: Not sharded, or a unit is in use.
    """
    _find(model).release_buffers()


@collective
def offload_states(
    model: nn.Module,
    backup: Backup,
    kinds: Collection[StateKind] = tuple(StateKind),
    *,
    non_blocking: bool = False,
) -> None:
    """Give the memory of training state back until `reload_states`; a backup has the bytes.

    Collective, with the same kinds on every rank. Between steps or micro-batches, with gradients
    waiting or not. Where a backup raises, all is where it was, on every rank.

    Tensors keep their identity, and raise StateError when they are used; so does whatever needs
    them. What needs nothing that is parked goes on working: forwards without the optimizer's state,
    say. `zero_grad()` and `memory_report()` always do. Left where they are: single numbers, what
    is not on the group's device or not torch's own to free, and, with a warning, memory that a
    graph or somebody else views.

    Args:
        model: The very module that was sharded.
        backup: Of this call only; closed when its bytes are back.
        kinds: What to park.
        non_blocking: Whether copies may be left to the current stream when this returns; the memory
            is free for what follows there.

    Raises:
        StateError: Not sharded, parked already, inside a forward, a backward or a context that
            gathers, or after a backward that an exception ended; or the backup of another rank
            has raised.
        zero_comm.CommError: A rank did not take part in time.
    """
    _states.offload_states(_find(model), backup, kinds, non_blocking=non_blocking)


@collective
def reload_states(model: nn.Module, *, non_blocking: bool = False) -> None:
    """Bring back what `offload_states` has put elsewhere, in new memory. Every rank calls it.

    Collective for parameters that rest sharded where peers can read them, else local.

    Every tensor views its values again: the optimizer's state, gradients, parameters, graphs made
    before. Nothing happens where nothing is parked. After an error in the backup it can be called
    again.

    Args:
        model: The very module that was sharded.
        non_blocking: As for `offload_states`.

    Raises:
        StateError: Not sharded.
        zero_comm.CommError: A rank did not take part in time.
    """
    _states.reload_states(_find(model), non_blocking=non_blocking)


@collective
def unpartition(model: nn.Module) -> None:
    """Make the model and its optimizer plain again, with whole parameters and state. Collective.

    Afterwards every rank holds all of it, in memory of its own, and no hook is left: the model can
    be copied, pickled, compiled, handed on, or sharded again. The objects stay the same.

    Raises:
        StateError: Not sharded, a forward is running, at stages 1 to 3 gradients wait for the
            optimizer, or its state is laid out so that no whole of it is known; nothing was done.
        zero_comm.CommError: A rank did not take part in time.
    """
    _unpartition.unpartition(_find(model))


def memory_report(model: nn.Module) -> _memory.MemoryReport:
    """Count this rank's bytes of model state and buffers, each kind apart. Local.

    Raises:
        StateError: Not sharded.
    """
    return _memory.memory_report(_find(model))


def schedule_report(model: nn.Module) -> _schedule_report.ScheduleReport:
    """When each unit of a model sharded at stage 3 is whole, and in which memory. Local.

    Of the last training step, or the last evaluation where nothing was trained yet. A rank whose
    order changes from step to step launches what the step before it would have needed.

    Returns:
        No rows where parameters rest whole, and before the second forward.

    Raises:
        StateError: Not sharded.
    """
    return _schedule_report.schedule_report(_find(model))


def traffic_report(model: nn.Module) -> Traffic:
    """What this rank sent for a model in its last step, from one `optimizer.step()` to the next.

    Local. A gather that was launched ahead counts in the step that it was launched for.

    Returns:
        Per operation, and by subject per unit; what was sent so far where none is complete.

    Raises:
        StateError: Not sharded.
    """
    log = _find(model).routes.log
    return log.now if log.last is None else log.last


@contextmanager
def record_codec_errors(model: nn.Module) -> Iterator[CodecErrors]:
    """Find out what codecs lose of what this rank sends within the context. Local.

    Of its shards in gathers that are launched there, and of its own gradients in the first hop of
    their reduction, without what `Loco` adds to them. What it sends is encoded and decoded once
    more to see; nothing else changes.

    Yields:
        `params.relative()` and `gradients.relative()`: by unit, the norm of what was lost by the
        norm of what was to be sent; only units of which something was sent encoded.

    Raises:
        StateError: Not sharded.
    """
    units, errors = _find(model).units, CodecErrors()
    before = [unit.errors for unit in units]
    for unit in units:
        unit.errors = errors
    try:
        yield errors
    finally:
        for unit, outer in zip(units, before, strict=True):
            unit.errors = outer


def _find(model_or_optimizer: nn.Module | torch.optim.Optimizer) -> ShardedModel:
    if isinstance(model_or_optimizer, nn.Module):
        sharded = find_sharded(model_or_optimizer)
    else:
        sharded = find_sharded_by_optimizer(model_or_optimizer)
    if sharded is None:
        raise StateError(
            f"expected a model or optimizer that was sharded, got a "
            f"{type(model_or_optimizer).__name__} that was not; call zero_engine.shard() first, "
            "and pass the very module it returned"
        )
    return sharded
