"""Whole values by parameter, this rank's parts of them, and where they lie."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor, nn
from zero_comm import collective

from ._errors import StateError
from ._given import copy_given, for_rank, given_value
from ._placement import Placement
from ._places import Place, place_of
from ._shard_state import ShardState
from ._span import Span
from ._whole import launch_whole, part_of, refuse_parked_values, write_whole

# NOTE(arguments): every function here, in `_grad_access` and in `_state_access` takes the model's
# own Parameter object, tied and frozen ones included, at every stage. What it returns is a copy,
# the caller's to keep; shapes are the parameter's, and local parts are 1-D and may be empty. At
# stage 0 a local part is the whole.


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
    place = place_of(param, what="full_param()")
    refuse_parked_values(place, "full_param()")
    if place.buffer.has_masters:
        part = part_of(place, place.buffer.trained)
        return for_rank(place, launch_whole(place, part.to(place.group.device))(), to_rank)
    if place.unit.placement is Placement.SHARDED or place.buffer.codec is not None:
        return for_rank(place, launch_whole(place)(), to_rank)
    assert place.buffer.whole is not None, "replicated parameters have a whole buffer"
    value = place.buffer.views_of(place.buffer.whole)[place.position]
    return for_rank(place, value.detach().clone(), to_rank)


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
    place = place_of(param, what="set_full_param()")
    plan = place.buffer.plan.params[place.position]
    whole = given_value(
        place, value, (plan.shape, place.buffer.training.dtype), from_rank, "set_full_param()"
    )
    _check_free(place, "set_full_param()")
    write_whole(place, whole)


def local_param(param: nn.Parameter) -> Tensor:
    """This rank's part of a parameter, 1-D. Local.

    Raises:
        StateError: `param` belongs to no sharded model.
    """
    place = place_of(param, what="local_param()")
    refuse_parked_values(place, "local_param()")
    return _part_or_whole(place).detach().clone()


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
            f"{place.whole.rank}), and the ranks would differ; use set_full_param()"
        )
    _check_free(place, "set_local_param()")
    place.sharded.begin_write()
    for rest in dict.fromkeys((place.buffer.training, place.buffer.resting)):
        with rest.edit() as shard:
            copy_given(place, part_of(place, shard), value, "set_local_param()")
    place.sharded.end_write(place.unit)


def _check_free(place: Place, what: str) -> None:
    rank = place.whole.rank
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


def _part_or_whole(place: Place) -> Tensor:
    if place.sharded.placements.optim is Placement.SHARDED:
        return part_of(place, place.buffer.trained)
    assert place.buffer.whole is not None, "replicated parameters have a whole buffer"
    return place.buffer.views_of(place.buffer.whole)[place.position]
