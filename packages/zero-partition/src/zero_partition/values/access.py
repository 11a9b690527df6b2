"""Whole values by parameter, and this rank's part: of parameters, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from zero_comm import all_gather_json, broadcast_flat, collective

from zero_partition.dtensors import local_of, outer_of, part_of_whole, plain_of, whole_over_mesh
from zero_partition.errors import StateError
from zero_partition.nested import flat_entries, keys_of_entry, set_entry
from zero_partition.optimizer.shards import Entry, PerRankEntry, PlainEntry
from zero_partition.plan.layout import Span
from zero_partition.plan.stages import Placement
from zero_partition.run.gradients import ACCUMULATED, BufferGradients
from zero_partition.run.sharded_model import (
    ModelPhase,
    ParamRef,
    launch_trained,
    launch_whole,
    param_ref_of,
    part_of,
    write_whole,
)
from zero_partition.run.unit import ShardState
from zero_partition.stand_in import StateKind
from zero_partition.torch_private import plain_access

from .runs import entry_on_each, gather_state_info, launch_entry, owner_of, plan_state

# NOTE(arguments): every function here takes the model's own Parameter object, tied and frozen ones
# included, at every stage. What it returns is a copy, the caller's to keep; shapes are the
# parameter's, and local parts are 1-D and may be empty. At stage 0 a local part is the whole.


def _for_rank(param_ref: ParamRef, value: Any, to_rank: int | None) -> Any:
    """Return the value on `to_rank`, or on all ranks when that is None; None elsewhere.

    A value of a DTensor's part is made whole over its mesh first.
    """
    if isinstance(value, Tensor) and value.shape == param_ref.plan.shape:
        value = whole_over_mesh(param_ref.param, value)
    return value if to_rank in (None, param_ref.whole.rank) else None


def _said_by(param_ref: ParamRef, from_rank: int | None, own: Any, what: str) -> Any:
    """Return `own` of rank `from_rank`, sent as JSON, or this rank's when that is None.

    Collective with `from_rank`.
    """
    group = param_ref.whole
    if from_rank is None:
        return own
    if not 0 <= from_rank < group.world_size:
        raise StateError(
            f"{what}: expected from_rank in 0..{group.world_size - 1}, got {from_rank} (rank "
            f"{group.rank})"
        )
    mine = own if group.rank == from_rank else None
    return all_gather_json(mine, group=group, tag=param_ref.sharded.access_tag)[from_rank]


def _given(
    param_ref: ParamRef,
    value: Any,
    expected: tuple[torch.Size, torch.dtype],
    from_rank: int | None,
    what: str,
) -> Tensor:
    """The whole value that every rank is to write, checked on all. Collective with `from_rank`."""
    (shape, dtype), group, value = expected, param_ref.whole, plain_of(value)
    if is_of_param := shape == param_ref.plan.shape:
        shape = outer_of(param_ref.param).shape
    own = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    got = _said_by(param_ref, from_rank, own, what)
    if got != f"shape {tuple(shape)}":
        whose = group.rank if from_rank is None else from_rank
        raise StateError(
            f"{what}: parameter {param_ref.name!r}: expected a tensor of shape {tuple(shape)}, got "
            f"{got} on rank {whose} (seen on rank {group.rank})"
        )
    if from_rank is None:
        whole = value.detach().as_subclass(Tensor).to(group.device, dtype)
    else:
        whole = torch.empty(shape, dtype=dtype, device=group.device)
        if group.rank == from_rank:
            whole.copy_(value.detach())
        if whole.numel():
            broadcast_flat(whole.view(-1).view(torch.uint8), src=from_rank, group=group).wait()
    return part_of_whole(param_ref.param, whole) if is_of_param else whole


def _copy_given(param_ref: ParamRef, part: Tensor, value: Any, what: str) -> None:
    """Write what was given as this rank's part into that part. Local."""
    if not isinstance(value, Tensor) or value.numel() != part.numel():
        got = f"{value.numel()} elements" if isinstance(value, Tensor) else repr(value)
        raise StateError(
            f"{what}: parameter {param_ref.name!r}: expected this rank's part, a tensor of "
            f"{part.numel()} elements, got {got} (rank {param_ref.whole.rank})"
        )
    with torch.no_grad():
        part.copy_(value.detach().view(part.shape))


@collective
def full_grad(param: nn.Parameter, *, to_rank: int | None = None) -> Tensor | None:
    """The whole gradient of a parameter, averaged over the ranks. Collective at every stage.

    There from the end of backward until `zero_grad()`. Inside `no_sync` it is what this rank has
    accumulated there by itself, not averaged, and nothing is sent; after it, what is left to be
    reduced is reduced first.

    Returns:
        None where plain torch would have None: a frozen parameter, or one that no rank used.

    Raises:
        StateError: There was no backward since `zero_grad()`, a backward is running or was ended
            by an exception, or `param` belongs to no sharded model.
    """
    param_ref = param_ref_of(param, what="full_grad()")
    param_ref.sharded.compare_launches("full_grad()", at_once=True)
    wait = launch_grad(param_ref, "full_grad()")
    return None if wait is None else _for_rank(param_ref, wait(), to_rank)


@collective
def set_full_grad(
    param: nn.Parameter, value: Tensor | None, *, from_rank: int | None = None
) -> None:
    """Write the whole gradient of a parameter. Every rank calls it, as `set_full_param`.

    Inside `no_sync` it replaces what this rank has accumulated there.

    Raises:
        StateError: As for `full_grad`; another shape, or a frozen parameter.
    """
    what = "set_full_grad()"
    param_ref = param_ref_of(param, what=what)
    plan = param_ref.plan
    whole = _given(param_ref, value, (plan.shape, plan.dtype), from_rank, what)
    if not param_ref.is_trainable:
        raise StateError(
            f"{what}: parameter {param_ref.name!r} was frozen when it was sharded, and has no "
            "memory for a gradient; unfreeze it, and call the model"
        )
    gradients = _gradients_of(param_ref, what)
    assert gradients is not None, "it trains"
    with plain_access():
        param_ref.sharded.reducer.set_whole(gradients, param_ref.position, whole)


def local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the reduced gradient, 1-D, None where `full_grad` gives None. Local.

    Raises:
        StateError: As for `full_grad`; inside `no_sync`, or where it left gradients to reduce.
    """
    param_ref = param_ref_of(param, what="local_grad()")
    part = _local_grad(param_ref, "local_grad()")
    return None if part is None else part.detach().clone()


def set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's part of a gradient that is there. Every rank calls it; sends nothing.

    Raises:
        StateError: As for `local_grad`; there is no gradient, or another numel than it has.
    """
    param_ref = param_ref_of(param, what="set_local_grad()")
    part = _local_grad(param_ref, "set_local_grad()")
    if part is None:
        raise StateError(
            f"set_local_grad(): parameter {param_ref.name!r} has no gradient (rank "
            f"{param_ref.whole.rank}); set_full_grad() makes one"
        )
    _copy_given(param_ref, part, value, "set_local_grad()")


@collective
def update_full_grads(
    params: Iterable[nn.Parameter],
    update: Callable[[nn.Parameter, Tensor], Tensor | None],
    *,
    ahead: int = 8,
) -> None:
    """Replace whole gradients of many parameters, gathering ahead of the work. Collective.

    Args:
        params: In the same order on every rank. Those without a gradient are passed over.
        update: Called on every rank with a parameter and its whole gradient; returns the new one,
            the same on every rank, or None if it has changed the one it got in place.
        ahead: How many gradients travel while one is worked on.

    Raises:
        StateError: As for `full_grad`; inside `no_sync`; or `update` returns another shape.
    """
    what = "update_full_grads()"
    queue: list[tuple[nn.Parameter, Callable[..., Tensor]]] = []

    def finish(param: nn.Parameter, wait: Callable[..., Tensor]) -> None:
        grad = whole_over_mesh(local_of(param), wait())
        changed = update(param, grad)
        set_full_grad(param, grad if changed is None else changed)

    for param in dict.fromkeys(params):
        param_ref = param_ref_of(param, what=what)
        wait = launch_grad(param_ref, what)
        if wait is not None:
            queue.append((param, wait))
        if len(queue) > ahead:
            finish(*queue.pop(0))
    for pair in queue:
        finish(*pair)


def _gradients_of(param_ref: ParamRef, what: str) -> BufferGradients | None:
    """Return the gradients of the parameter's buffer; None if it is frozen. Collective.

    Gradients that `no_sync` has left are reduced first, unless this is inside `no_sync`.

    Raises:
        StateError: There can be no gradients now.
    """
    sharded, reducer = param_ref.sharded, param_ref.sharded.reducer
    no = (ModelPhase.BACKWARD, ModelPhase.FAILED)
    sharded.require(what, StateKind.GRADS, no=no)
    with plain_access():
        if reducer.sync:
            reducer.before_step()
        has_any = any(g.has_local or g.holds_gradients for g in reducer.gradients)
    if not has_any:
        raise StateError(
            f"{what}: parameter {param_ref.name!r}: there are no gradients now (rank "
            f"{param_ref.whole.rank}); they are there from the end of loss.backward() until "
            "zero_grad()"
        )
    return next((g for g in reducer.gradients if g.buffer is param_ref.buffer), None)


def launch_grad(param_ref: ParamRef, what: str) -> Callable[..., Tensor] | None:
    """Launch a gradient's gather; return a call that waits, None if there is none. Collective."""
    g, position = _gradients_of(param_ref, what), param_ref.position
    if g is None:
        return None
    with plain_access():
        if not param_ref.sharded.reducer.sync:
            return g.views[position].clone if g.states[position] is ACCUMULATED else None
        grad = g.stepped_params[position].grad
        if grad is None:
            return None
        if not g.shards_state:
            return grad.detach().clone
        part = grad.as_subclass(Tensor).detach().view(-1)
        return launch_whole(param_ref, part.to(param_ref.group.device))


def _local_grad(param_ref: ParamRef, what: str) -> Tensor | None:
    if any(g.has_local for g in param_ref.sharded.reducer.gradients):
        raise StateError(
            f"{what}: parameter {param_ref.name!r}: inside no_sync, and until the gradients it "
            f"left are reduced, no rank has its part (rank {param_ref.whole.rank}); call "
            "full_grad(param)"
        )
    g = _gradients_of(param_ref, what)
    with plain_access():
        grad = None if g is None else g.stepped_params[param_ref.position].grad
    return None if grad is None else grad.as_subclass(Tensor).view(-1)


@frozen
class ParameterStatus:
    """Facts about a parameter, found without gathering or changing it."""

    names: tuple[str, ...]  # tied parameters have several
    unit: str  # name of the unit it belongs to; "" is the model itself
    shape: torch.Size
    dtype: torch.dtype
    is_trainable: bool
    is_whole: bool  # its values can be read right now
    part: Span  # the elements that this rank keeps; all of them where it is replicated


def parameter_status(param: nn.Parameter) -> ParameterStatus:
    """Return the unit and this rank's part of a parameter, and whether it is whole. Local.

    Raises:
        StateError: `param` belongs to no sharded model.
    """
    param_ref = param_ref_of(param, what="parameter_status()")
    plan, part = param_ref.plan, param_ref.kept
    if param_ref.unit.placement is Placement.REPLICATED:
        part = Span(0, plan.shape.numel())
    is_whole = param_ref.unit.state is ShardState.UNSHARDED or param_ref.is_gathered
    return ParameterStatus(
        plan.names, param_ref.unit.plan.name, plan.shape, plan.dtype, plan.trainable, is_whole, part
    )


@collective
def full_param(param: nn.Parameter, *, to_rank: int | None = None) -> Tensor | None:
    """The whole value of a parameter. Collective at every stage.

    Inside `GatheredParameters` with a modifier it is the value before the changes.

    Args:
        param: The model's own Parameter object.
        to_rank: The only rank of the group that needs it; the others receive None.

    Raises:
        StateError: `param` belongs to no sharded model.
        zero_comm.CommError: A rank did not take part in time.
    """
    param_ref = param_ref_of(param, what="full_param()")
    _require_values(param_ref, "full_param()")
    param_ref.sharded.compare_launches("full_param()", at_once=True)
    param_ref.sharded.follow_shard_writes()
    return _for_rank(param_ref, launch_trained(param_ref)(), to_rank)


@collective
def set_full_param(
    param: nn.Parameter, value: Tensor | None, *, from_rank: int | None = None
) -> None:
    """Write the whole value of a parameter. Every rank calls it; sends nothing without `from_rank`.

    Args:
        param: The model's own Parameter object.
        value: Of the parameter's shape; cast to its dtype. The same on every rank, or, with
            `from_rank`, looked at on that rank only.
        from_rank: Whose value every rank takes.

    Raises:
        StateError: Another shape, a parameter that is gathered or in use by a forward or backward,
            or one of no sharded model.
    """
    param_ref = param_ref_of(param, what="set_full_param()")
    expected = (param_ref.plan.shape, param_ref.buffer.main_shard.dtype)
    whole = _given(param_ref, value, expected, from_rank, "set_full_param()")
    _check_free(param_ref, "set_full_param()")
    write_whole(param_ref, whole)


def local_param(param: nn.Parameter) -> Tensor:
    """This rank's part of a parameter, 1-D. Local.

    Raises:
        StateError: `param` belongs to no sharded model.
    """
    param_ref = param_ref_of(param, what="local_param()")
    _require_values(param_ref, "local_param()")
    buffer = param_ref.buffer
    buffer.follow_writes()
    if param_ref.sharded.shards_state:
        return part_of(param_ref, buffer.trained).detach().clone()
    assert buffer.whole is not None, "replicated parameters have a whole buffer"
    return buffer.views_of(buffer.whole)[param_ref.position].detach().clone()


def set_local_param(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's part of a parameter. Every rank calls it.

    Sends nothing where the parameter is sharded. Where it rests whole (at stages 1 and 2, and small
    ones at 3), it is collective, and each rank gets the parts of all.

    Raises:
        StateError: Another numel than `local_param` has, stage 0, where there are no parts, or as
            for `set_full_param`.
    """
    param_ref = param_ref_of(param, what="set_local_param()")
    if not param_ref.sharded.shards_state:
        raise StateError(
            f"set_local_param(): parameter {param_ref.name!r} is whole on every rank at stage 0 "
            f"(rank {param_ref.whole.rank}), and the ranks would differ; use set_full_param()"
        )
    _check_free(param_ref, "set_local_param()")
    if param_ref.unit.placement is Placement.REPLICATED:
        part = torch.empty_like(part_of(param_ref, param_ref.buffer.trained))
        _copy_given(param_ref, part, value, "set_local_param()")
        write_whole(param_ref, launch_whole(param_ref, part)())
        return
    param_ref.sharded.begin_write()
    for rest in dict.fromkeys((param_ref.buffer.main_shard, param_ref.buffer.model_shard)):
        with rest.edit() as shard:
            _copy_given(param_ref, part_of(param_ref, shard), value, "set_local_param()")
    param_ref.sharded.end_write(param_ref.unit)


def _require_values(param_ref: ParamRef, what: str) -> None:
    kind = StateKind.MASTERS if param_ref.buffer.has_masters else StateKind.PARAMS
    param_ref.sharded.require(what, kind)


def _check_free(param_ref: ParamRef, what: str) -> None:
    rank = param_ref.whole.rank
    if param_ref.sharded.schedule.is_in_use(param_ref.unit):
        raise StateError(
            f"{what}: parameter {param_ref.name!r} is in use by a forward or backward of its unit "
            f"{param_ref.unit.name!r} (rank {rank}); write it between steps"
        )
    if param_ref in param_ref.sharded.gathered:
        raise StateError(
            f"{what}: parameter {param_ref.name!r} is gathered (rank {rank}), and the value "
            "written would be out of date; write to param.data there, with modifier_rank, or leave "
            "first"
        )


@collective
def full_optimizer_state(param: nn.Parameter, key: str, *, to_rank: int | None = None) -> Any:
    """The whole of one entry of the optimizer's state, "exp_avg" say. Collective at every stage.

    Its shape is that of plain torch's entry. How the ranks have it follows from the parameter's
    cut: one value per element; under "row" one slice per row, and under "block(k)" one per block,
    along the first dim; and anything at all on the one rank that keeps the whole parameter, as
    under "tensor", which then sends it.

    Returns:
        A tensor that the caller may keep; what is one value for the whole parameter ("step") as it
        is.

    Raises:
        StateError: No optimizer, no state yet (it comes with the first step), no such key, an entry
            whose parts are not laid out in any of these ways, or `param` belongs to no sharded
            model.
    """
    what = "full_optimizer_state()"
    param_ref = param_ref_of(param, what=what)
    state, entry = _agree(param_ref, key, what)
    if not param_ref.sharded.shards_state:
        return _for_rank(param_ref, _copy_of(state[key]), to_rank)
    tag = param_ref.sharded.access_tag
    whole = launch_entry(entry, state, key, group=param_ref.group, tag=tag)()
    return _for_rank(param_ref, whole, to_rank)


@collective
def set_full_optimizer_state(
    param: nn.Parameter, key: str, value: Any, *, from_rank: int | None = None
) -> None:
    """Write the whole of one entry of the optimizer's state. Every rank calls it. Collective.

    Args:
        param: The model's own Parameter object.
        key: An entry that is there.
        value: As `full_optimizer_state` returns it; a number will do for a tensor of no dims. The
            same on every rank, or, with `from_rank`, looked at on that rank only.
        from_rank: Whose value every rank takes.

    Raises:
        StateError: As for `full_optimizer_state`, or a value of another shape.
    """
    what = "set_full_optimizer_state()"
    param_ref = param_ref_of(param, what=what)
    state, entry = _agree(param_ref, key, what)
    if isinstance(entry, PlainEntry):
        value = _said_by(param_ref, from_rank, value, what)
        if key in state:
            _keep(param_ref, key, value)
        return
    if isinstance(entry, PerRankEntry):
        raise StateError(
            f"{what}: {key!r} of parameter {param_ref.name!r} is no tensor and no number, and only "
            "its owner has it; set_local_optimizer_state(param, key, value) writes it there"
        )
    if isinstance(value, int | float) and not entry.shape:
        value = torch.tensor(value, dtype=entry.dtype, device="cpu")
    whole = _given(param_ref, value, (entry.shape, entry.dtype), from_rank, what)
    is_sharded = param_ref.sharded.shards_state
    span = entry.spans[param_ref.group.rank] if is_sharded else Span(0, whole.numel())
    if span.numel:
        part = whole.reshape(-1)[span.as_slice()].view(state[key].shape)
        _keep(param_ref, key, state[key].copy_(part))


def local_optimizer_state(param: nn.Parameter, key: str) -> Any:
    """This rank's part of one entry of the optimizer's state, in the optimizer's shape. Local.

    That is 1-D and even where the cut is flat, and whatever the optimizer made of its shard
    elsewhere; what is one value for the whole parameter is on every rank that keeps a part of it.

    Raises:
        StateError: No optimizer, no state yet, or none on this rank, no such key, or `param`
            belongs to no sharded model.
    """
    what = "local_optimizer_state()"
    return _copy_of(_own_state(param_ref_of(param, what=what), key, what)[key])


def set_local_optimizer_state(param: nn.Parameter, key: str, value: Any) -> None:
    """Write this rank's part of one entry of the optimizer's state. Local.

    Raises:
        StateError: As for `local_optimizer_state`, or a value of another numel.
    """
    what = "set_local_optimizer_state()"
    param_ref = param_ref_of(param, what=what)
    state = _own_state(param_ref, key, what)
    if not isinstance(state[key], Tensor):
        _keep(param_ref, key, value)
        return
    if isinstance(value, int | float) and not state[key].dim():
        value = torch.tensor(value, device="cpu")
    _copy_given(param_ref, state[key], value, what)
    _keep(param_ref, key, state[key])


def _copy_of(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _keep(param_ref: ParamRef, key: str, value: Any) -> None:
    """Set the entry in the optimizer's state, and write it back where that is offloaded."""
    assert param_ref.sharded.optimizer is not None, "it has state"
    states, owner = param_ref.sharded.optimizer.state, owner_of(param_ref)
    state = states[owner]
    set_entry(state, key, value)
    if param_ref.sharded.residence.offload is not None:
        root = keys_of_entry(key)[0]
        states[owner] = {root: state[root]}


def _state_of(param_ref: ParamRef, what: str) -> dict[str, Any]:
    """This rank's state of the parameter, empty where it has none. Local."""
    param_ref.sharded.require(what, StateKind.OPTIM)
    if param_ref.sharded.optimizer is None:
        raise StateError(
            f"{what}: the model was sharded without an optimizer (rank {param_ref.whole.rank})"
        )
    return flat_entries(param_ref.sharded.optimizer.state.get(owner_of(param_ref), {}))


def _own_state(param_ref: ParamRef, key: str, what: str) -> dict[str, Any]:
    state = _state_of(param_ref, what)
    if not state and param_ref.sharded.shards_state and param_ref.piece is None:
        raise StateError(
            f"{what}: rank {param_ref.whole.rank} keeps no part of parameter {param_ref.name!r}, "
            "and its optimizer no state of it; local_param(param) is empty there, and "
            "full_optimizer_state(param, key) asks the others"
        )
    _check_known(param_ref, key, state, what)
    return state


def _agree(param_ref: ParamRef, key: str, what: str) -> tuple[dict[str, Any], Entry]:
    """Return this rank's state, and how the entry is divided over all ranks. Collective."""
    state = _state_of(param_ref, what)
    if not param_ref.sharded.shards_state:
        _check_known(param_ref, key, state, what)
        return state, entry_on_each(state[key], param_ref.group.world_size)
    (infos,) = gather_state_info([state], group=param_ref.group, tag=param_ref.sharded.access_tag)
    _check_known(param_ref, key, {name: None for of_rank in infos for name in of_rank}, what)
    chosen = [{key: of[key]} if key in of else {} for of in infos]
    try:
        return state, plan_state(param_ref, chosen)[key]
    except StateError as error:
        raise StateError(f"{what}: {error} (seen on rank {param_ref.group.rank})") from error


def _check_known(param_ref: ParamRef, key: str, known: Mapping[str, Any], what: str) -> None:
    rank = param_ref.whole.rank
    if not known:
        raise StateError(
            f"{what}: the optimizer has no state for parameter {param_ref.name!r} (rank {rank}): "
            "it is frozen or in no param group, or no step has had a gradient for it yet"
        )
    if key not in known:
        raise StateError(
            f"{what}: parameter {param_ref.name!r}: expected one of {sorted(known)}, got {key!r} "
            f"(rank {rank})"
        )
