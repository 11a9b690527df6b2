"""Whole values, gradients and optimizer state by parameter; and this rank's parts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from zero_comm import all_gather_flat, broadcast_flat

from ._cut import Cut
from ._errors import StateError
from ._gradients import BufferGradients
from ._placement import Placement
from ._places import Place, place_of
from ._shard_state import ShardState
from ._span import Span
from ._torch_compat import plain_access
from ._whole import launch_whole, part_of, write_whole

# NOTE(arguments): every function takes the model's own Parameter object, tied and frozen ones
# included, at every stage. What it returns is a copy, the caller's to keep; shapes are the
# parameter's, and local parts are 1-D and may be empty. At stage 0 a local part is the whole.


@frozen
class ParameterStatus:
    """What the partition knows about a parameter, without touching it."""

    names: tuple[str, ...]  # tied parameters have several
    unit: str  # the module it is unsharded with; "" is the model itself
    shape: torch.Size
    dtype: torch.dtype
    is_trainable: bool
    is_whole: bool  # its values can be read right now
    part: Span  # the elements that this rank keeps; all of them where it rests whole


def parameter_status(param: nn.Parameter) -> ParameterStatus:
    """Where a parameter lies and whether it is whole. Local.

    Raises:
        StateError: `param` belongs to no sharded model.
    """
    place = place_of(param, what="parameter_status()")
    plan, piece = place.buffer.plan.params[place.position], place.piece
    if place.unit.placement is Placement.REPLICATED:
        part = Span(0, plan.shape.numel())
    else:
        part = Span(0, 0) if piece is None else piece.in_tensor
    is_whole = place.unit.state is ShardState.UNSHARDED or place.position in place.buffer.held
    return ParameterStatus(
        plan.names, place.unit.plan.name, plan.shape, plan.dtype, plan.trainable, is_whole, part
    )


# ---- Values ----


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
    place = place_of(param, what="full_param()")
    if place.unit.placement is Placement.SHARDED:
        return _for_rank(place, launch_whole(place)(), to_rank)
    assert place.buffer.whole is not None, "replicated parameters have a whole buffer"
    value = place.buffer.views_of(place.buffer.whole)[place.position]
    return _for_rank(place, value.detach().clone(), to_rank)


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
    place = place_of(param, what="set_full_param()")
    plan = place.buffer.plan.params[place.position]
    whole = _from_rank(place, value, plan.dtype, from_rank, "set_full_param()")
    _check_free(place, "set_full_param()")
    write_whole(place, whole)


def local_param(param: nn.Parameter) -> Tensor:
    """This rank's part of a parameter, 1-D. Local.

    Raises:
        StateError: `param` belongs to no sharded model.
    """
    return _part_or_whole(place_of(param, what="local_param()")).detach().clone()


def set_local_param(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's part of a parameter that rests sharded. Every rank calls it, sends nothing.

    Raises:
        StateError: Another numel than `local_param` has, parameters that rest whole (stages 0 to
            2), or as for `set_full_param`.
    """
    place = place_of(param, what="set_local_param()")
    if place.unit.placement is Placement.REPLICATED:
        raise StateError(
            f"set_local_param(): parameter {place.name!r} rests whole on every rank (rank "
            f"{place.group.rank}), and the ranks would differ; use set_full_param()"
        )
    _check_free(place, "set_local_param()")
    place.sharded.begin_write()
    _copy_part(place, part_of(place), value, "set_local_param()")
    place.sharded.end_write(place.unit)


# ---- Gradients ----


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
    place = place_of(param, what="full_grad()")
    wait = _launch_grad(place, "full_grad()")
    return None if wait is None else _for_rank(place, wait(), to_rank)


def set_full_grad(
    param: nn.Parameter, value: Tensor | None, *, from_rank: int | None = None
) -> None:
    """Write the whole gradient of a parameter. Every rank calls it, as `set_full_param`.

    Inside `no_sync` it replaces what this rank has accumulated there.

    Raises:
        StateError: As for `full_grad`; another shape, or a frozen parameter.
    """
    what = "set_full_grad()"
    place = place_of(param, what=what)
    whole = _from_rank(place, value, place.buffer.plan.dtype, from_rank, what)
    gradients = _gradients_of(place)
    if gradients is None:
        raise StateError(
            f"{what}: parameter {place.name!r} was frozen when it was sharded, and has no memory "
            "for a gradient; unfreeze parameters before shard()"
        )
    _check_grads(place, what)
    with plain_access():
        place.sharded.reducer.set_whole(gradients, place.position, whole)


def local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the reduced gradient, 1-D, None where `full_grad` gives None. Local.

    Raises:
        StateError: As for `full_grad`; inside `no_sync`, or where it left gradients to reduce.
    """
    place = place_of(param, what="local_grad()")
    part = _local_grad(place, "local_grad()")
    return None if part is None else part.detach().clone()


def set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's part of a gradient that is there. Every rank calls it; sends nothing.

    Raises:
        StateError: As for `local_grad`; there is no gradient, or another numel than it has.
    """
    place = place_of(param, what="set_local_grad()")
    part = _local_grad(place, "set_local_grad()")
    if part is None:
        raise StateError(
            f"set_local_grad(): parameter {place.name!r} has no gradient (rank "
            f"{place.group.rank}); set_full_grad() makes one"
        )
    _copy_part(place, part, value, "set_local_grad()")


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
        grad = wait()
        changed = update(param, grad)
        set_full_grad(param, grad if changed is None else changed)

    for param in dict.fromkeys(params):
        place = place_of(param, what=what)
        wait = _launch_grad(place, what)
        if wait is not None:
            queue.append((param, wait))
        if len(queue) > ahead:
            finish(*queue.pop(0))
    for pair in queue:
        finish(*pair)


# ---- Optimizer state ----


def full_optimizer_state(param: nn.Parameter, key: str, *, to_rank: int | None = None) -> Any:
    """The whole of one entry of the optimizer's state, "exp_avg" say. Collective at every stage.

    Returns:
        A tensor of the parameter's shape; what is one number for the whole parameter ("step") as
        it is.

    Raises:
        StateError: No optimizer, no state yet (it comes with the first step), no such key, an entry
            that is not elementwise, a parameter whose cut is not flat, or `param` belongs to no
            sharded model.
    """
    what = "full_optimizer_state()"
    place = place_of(param, what=what)
    _check_flat(place, what)
    value = _state_of(place, key, what)
    if _is_scalar(value, key) or place.sharded.placements.optim is Placement.REPLICATED:
        copy = value.detach().clone() if isinstance(value, Tensor) else value
        return _for_rank(place, copy, to_rank)
    return _for_rank(place, launch_whole(place, value.reshape(-1))(), to_rank)


def set_full_optimizer_state(
    param: nn.Parameter, key: str, value: Any, *, from_rank: int | None = None
) -> None:
    """Write the whole of one entry of the optimizer's state. Every rank calls it.

    Args:
        param: The model's own Parameter object.
        key: An entry that is there.
        value: As `full_optimizer_state` returns it; the same on every rank unless `from_rank`,
            which takes tensors of the parameter's shape only.
        from_rank: Whose value every rank takes.

    Raises:
        StateError: As for `full_optimizer_state`, or a value of another shape.
    """
    what = "set_full_optimizer_state()"
    place = place_of(param, what=what)
    _check_flat(place, what)
    mine = _state_of(place, key, what)
    if _is_scalar(mine, key):
        _set_scalar(place, key, mine, value)
        return
    whole = _from_rank(place, value, mine.dtype, from_rank, what)
    if place.sharded.placements.optim is Placement.REPLICATED:
        mine.copy_(whole)
    elif place.piece is not None:
        mine.view(-1).copy_(whole.reshape(-1)[place.piece.in_tensor.as_slice()])


def local_optimizer_state(param: nn.Parameter, key: str) -> Any:
    """This rank's part of one entry of the optimizer's state, 1-D or one number. Local.

    Raises:
        StateError: As for `full_optimizer_state`.
    """
    value = _state_of(
        place_of(param, what="local_optimizer_state()"), key, "local_optimizer_state()"
    )
    return value.detach().clone() if isinstance(value, Tensor) else value


def set_local_optimizer_state(param: nn.Parameter, key: str, value: Any) -> None:
    """Write this rank's part of one entry of the optimizer's state. Local.

    Raises:
        StateError: As for `full_optimizer_state`, or a value of another numel.
    """
    what = "set_local_optimizer_state()"
    place = place_of(param, what=what)
    mine = _state_of(place, key, what)
    if _is_scalar(mine, key):
        _set_scalar(place, key, mine, value)
    else:
        _copy_part(place, mine.view(-1), value, what)


# ---- What they share ----


def _for_rank(place: Place, value: Any, to_rank: int | None) -> Any:
    return value if to_rank in (None, place.group.rank) else None


def _check_free(place: Place, what: str) -> None:
    rank = place.group.rank
    if place.sharded.schedule.is_in_use(place.unit):
        raise StateError(
            f"{what}: parameter {place.name!r} is in use by a forward or backward of its unit "
            f"{place.unit.name!r} (rank {rank}); write it between steps"
        )
    if place.key in place.sharded.gathered:
        raise StateError(
            f"{what}: parameter {place.name!r} is gathered (rank {rank}), and the value written "
            "would be out of date; write to param.data there, with modifier_rank, or leave first"
        )


def _from_rank(
    place: Place, value: Any, dtype: torch.dtype, from_rank: int | None, what: str
) -> Tensor:
    """The value that all ranks are to write, checked on all of them."""
    group = place.group
    shape = place.buffer.plan.params[place.position].shape
    if from_rank is not None and not 0 <= from_rank < group.world_size:
        raise StateError(
            f"{what}: expected from_rank in 0..{group.world_size - 1}, got {from_rank} (rank "
            f"{group.rank})"
        )
    is_asked = from_rank in (None, group.rank)
    fits = not is_asked or (isinstance(value, Tensor) and value.shape == shape)
    if from_rank is not None and group.world_size > 1:
        mine = torch.tensor([fits], dtype=torch.uint8, device=group.device)
        everyone = all_gather_flat(
            mine.new_empty(group.world_size),
            splits=[1] * group.world_size,
            group=group,
            shard=mine,
            tag=place.sharded.access_tag,
            control=True,
        ).wait()
        fits = bool(everyone.all())
    if not fits:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        got = got if is_asked else f"something else on rank {from_rank}"
        raise StateError(
            f"{what}: parameter {place.name!r}: expected a tensor of shape {tuple(shape)}, got "
            f"{got} (rank {group.rank})"
        )
    if from_rank is None:
        return value.detach().as_subclass(Tensor).to(group.device, dtype)
    whole = torch.empty(shape, dtype=dtype, device=group.device)
    if group.rank == from_rank:
        whole.copy_(value.detach())
    if whole.numel():
        broadcast_flat(whole.view(-1), src=from_rank, group=group).wait()
    return whole


def _copy_part(place: Place, part: Tensor, value: Any, what: str) -> None:
    if not isinstance(value, Tensor) or value.numel() != part.numel():
        got = f"{value.numel()} elements" if isinstance(value, Tensor) else repr(value)
        raise StateError(
            f"{what}: parameter {place.name!r}: expected this rank's part, a tensor of "
            f"{part.numel()} elements, got {got} (rank {place.group.rank})"
        )
    with torch.no_grad():
        part.copy_(value.detach().view(part.shape))


def _part_or_whole(place: Place) -> Tensor:
    if place.sharded.placements.optim is Placement.SHARDED:
        return part_of(place)
    assert place.buffer.whole is not None, "replicated parameters have a whole buffer"
    return place.buffer.views_of(place.buffer.whole)[place.position]


def _gradients_of(place: Place) -> BufferGradients | None:
    gradients = place.sharded.reducer.gradients
    return next((g for g in gradients if g.buffer is place.buffer), None)


def _check_grads(place: Place, what: str) -> None:
    """Reduce what no_sync left; raise where there can be no gradients."""
    sharded, reducer = place.sharded, place.sharded.reducer
    if sharded.is_backward_open:
        raise StateError(
            f"{what}: a backward is running, or an exception ended it (rank {place.group.rank}); "
            "gradients are there when backward() has returned"
        )
    with plain_access():
        if reducer.sync:
            reducer.before_step()
        has_any = any(g.has_local or g.holds_gradients for g in reducer.gradients)
    if not has_any:
        raise StateError(
            f"{what}: parameter {place.name!r}: there are no gradients now (rank "
            f"{place.group.rank}); they are there from the end of loss.backward() until "
            "zero_grad()"
        )


def _launch_grad(place: Place, what: str) -> Callable[..., Tensor] | None:
    _check_grads(place, what)
    g, position, reducer = _gradients_of(place), place.position, place.sharded.reducer
    if g is None:
        return None
    with plain_access():
        if not reducer.sync:
            return g.views[position].clone if g.filled[position] else None
        grad = g.targets[position].grad
        if grad is None:
            return None
        if not g.shards_state:
            return grad.detach().clone
        return launch_whole(place, grad.as_subclass(Tensor).detach())


def _local_grad(place: Place, what: str) -> Tensor | None:
    reducer, g = place.sharded.reducer, _gradients_of(place)
    if any(other.has_local for other in reducer.gradients):
        raise StateError(
            f"{what}: parameter {place.name!r}: inside no_sync, and until the gradients it left "
            f"are reduced, no rank has its part (rank {place.group.rank}); call full_grad(param)"
        )
    _check_grads(place, what)
    with plain_access():
        grad = None if g is None else g.targets[place.position].grad
    return None if grad is None else grad.as_subclass(Tensor)


def _check_flat(place: Place, what: str) -> None:
    """Raise on every rank where one that keeps nothing of a parameter has no state to show."""
    cut = place.buffer.plan.params[place.position].cut
    if place.sharded.placements.optim is Placement.SHARDED and cut != Cut.FLAT:
        raise StateError(
            f"{what}: parameter {place.name!r} has the cut {str(cut)!r}, under which its optimizer "
            "state has any shape, and only the ranks that keep a part of it have any (rank "
            f"{place.group.rank}); read it there with local_optimizer_state()"
        )


def _state_of(place: Place, key: str, what: str) -> Any:
    sharded, rank = place.sharded, place.group.rank
    if sharded.optimizer is None:
        raise StateError(f"{what}: the model was sharded without an optimizer (rank {rank})")
    is_sharded = sharded.placements.optim is Placement.SHARDED
    targets = place.buffer.shard_params if is_sharded else place.buffer.params
    state = sharded.optimizer.state.get(targets[place.position])
    if not state:
        raise StateError(
            f"{what}: the optimizer has no state for parameter {place.name!r} (rank {rank}): it is "
            "frozen or in no param group, or no step has had a gradient for it yet"
        )
    if key not in state:
        raise StateError(
            f"{what}: parameter {place.name!r}: expected one of {sorted(state)}, got {key!r} (rank "
            f"{rank})"
        )
    value, expected = state[key], targets[place.position]
    if not _is_scalar(value, key) and value.numel() != expected.numel():
        raise StateError(
            f"{what}: parameter {place.name!r}: entry {key!r} of shape {tuple(value.shape)} is not "
            f"elementwise (this rank has {expected.numel()} elements, rank {rank}), so it has no "
            "whole; read optimizer.state"
        )
    return value


def _is_scalar(value: Any, key: str) -> bool:
    return not isinstance(value, Tensor) or value.dim() == 0 or key == "step"


def _set_scalar(place: Place, key: str, mine: Any, value: Any) -> None:
    if isinstance(mine, Tensor):
        mine.fill_(value) if not isinstance(value, Tensor) else mine.copy_(value)
        return
    sharded = place.sharded
    is_sharded = sharded.placements.optim is Placement.SHARDED
    targets = place.buffer.shard_params if is_sharded else place.buffer.params
    assert sharded.optimizer is not None, "checked before"
    sharded.optimizer.state[targets[place.position]][key] = value
