"""Whole values by parameter, and this rank's part: of parameters, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from zero_comm import collective

from zero_partition.dtensors import local_of, whole_over_mesh
from zero_partition.plan.layout import Span
from zero_partition.plan.stages import Placement
from zero_partition.run.sharded_model import param_ref_of
from zero_partition.run.unit import ShardState

from .value import GradValue, ParamValue, StateValue

# NOTE(arguments): every function here takes the model's own Parameter object, tied and frozen ones
# included, at every stage. Tensors that it returns are copies, which the caller may keep. Whole
# tensors have the parameter's shape; local parts are 1-D and may be empty. At stage 0 a local part
# is the whole.


@collective
def full_grad(param: nn.Parameter, *, to_rank: int | None = None) -> Tensor | None:
    """The whole gradient of a parameter, averaged over the ranks. Collective at every stage.

    It exists from the end of backward until `zero_grad()`. Inside `no_sync` it is the gradient that
    this rank has accumulated, not averaged, and nothing is sent. After `no_sync`, gradients that
    are not reduced yet are reduced first.

    Returns:
        None where plain torch would have None: a frozen parameter, or one that no rank used.

    Raises:
        StateError: There was no backward since `zero_grad()`, a backward is running or was ended
            by an exception, or `param` belongs to no sharded model.
    """
    grad = GradValue(param, "full_grad()")
    grad.sharded.compare_launches("full_grad()", at_once=True)
    return grad.full(to_rank)


@collective
def set_full_grad(
    param: nn.Parameter, value: Tensor | None, *, from_rank: int | None = None
) -> None:
    """Write the whole gradient of a parameter. Every rank calls it, as `set_full_param`.

    Inside `no_sync` it replaces what this rank has accumulated there.

    Raises:
        StateError: As for `full_grad`; another shape, or a frozen parameter.
    """
    GradValue(param, "set_full_grad()").set_full(value, from_rank)


def local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the reduced gradient, 1-D, None where `full_grad` gives None. Local.

    Raises:
        StateError: As for `full_grad`; inside `no_sync`, or where it left gradients to reduce.
    """
    return GradValue(param, "local_grad()").local()


def set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's part of a gradient that is there. Every rank calls it; sends nothing.

    Raises:
        StateError: As for `local_grad`; there is no gradient, or another numel than it has.
    """
    GradValue(param, "set_local_grad()").set_local(value)


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
    queue: list[tuple[nn.Parameter, Callable[..., Tensor]]] = []

    def finish(param: nn.Parameter, wait: Callable[..., Tensor]) -> None:
        grad = whole_over_mesh(local_of(param), wait())
        changed = update(param, grad)
        set_full_grad(param, grad if changed is None else changed)

    for param in dict.fromkeys(params):
        wait = GradValue(param, "update_full_grads()").launch()
        if wait is not None:
            queue.append((param, wait))
        if len(queue) > ahead:
            finish(*queue.pop(0))
    for pair in queue:
        finish(*pair)


@frozen
class ParameterStatus:
    """Facts about a parameter, found without gathering or changing it."""

    # All its names; a tied parameter has several.
    names: tuple[str, ...]
    # Name of the unit that it belongs to; "" is the model itself.
    unit: str
    shape: torch.Size
    dtype: torch.dtype
    is_trainable: bool
    # Whether this rank can read all its values right now.
    is_whole: bool
    # Elements that this rank keeps; all of them if the parameter is replicated.
    part: Span


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
    return ParamValue(param, "full_param()").full(to_rank)


@collective
def set_full_param(
    param: nn.Parameter, value: Tensor | None, *, from_rank: int | None = None
) -> None:
    """Write the whole value of a parameter. Every rank calls it; sends nothing without `from_rank`.

    Args:
        param: The model's own Parameter object.
        value: Of the parameter's shape; cast to its dtype. The same on every rank, or, with
            `from_rank`, looked at on that rank only.
        from_rank: Rank whose value all ranks take.

    Raises:
        StateError: Another shape, a parameter that is gathered or in use by a forward or backward,
            or one of no sharded model.
    """
    ParamValue(param, "set_full_param()").set_full(value, from_rank)


def local_param(param: nn.Parameter) -> Tensor:
    """This rank's part of a parameter, 1-D. Local.

    Raises:
        StateError: `param` belongs to no sharded model.
    """
    return ParamValue(param, "local_param()").local()


def set_local_param(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's part of a parameter. Every rank calls it.

    Sends nothing if the parameter is sharded. If it is replicated (at stages 1 and 2, and small
    ones at 3), the call is collective, and each rank gets the parts of all ranks.

    Raises:
        StateError: Another numel than `local_param` has, stage 0, where there are no parts, or as
            for `set_full_param`.
    """
    ParamValue(param, "set_local_param()").set_local(value)


@collective
def full_optimizer_state(param: nn.Parameter, key: str, *, to_rank: int | None = None) -> Any:
    """The whole of one entry of the optimizer's state, "exp_avg" say. Collective at every stage.

    Its shape is that of plain torch's entry. How the ranks have it follows from the parameter's
    cut: one value per element; under "row" one slice per row, and under "block(k)" one per block,
    along the first dim; and anything at all on the one rank that keeps the whole parameter, as
    under "tensor", which then sends it.

    Returns:
        A tensor that the caller may keep. An entry that is one value for the whole parameter
        ("step") is returned as it is.

    Raises:
        StateError: No optimizer, no state yet (it comes with the first step), no such key, an entry
            whose parts are not laid out in any of these ways, or `param` belongs to no sharded
            model.
    """
    return StateValue(param, "full_optimizer_state()", key).full(to_rank)


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
        from_rank: Rank whose value all ranks take.

    Raises:
        StateError: As for `full_optimizer_state`, or a value of another shape.
    """
    StateValue(param, "set_full_optimizer_state()", key).set_full(value, from_rank)


def local_optimizer_state(param: nn.Parameter, key: str) -> Any:
    """This rank's part of one entry of the optimizer's state, in the optimizer's shape. Local.

    With a flat cut it is 1-D, and parts are even. With other cuts it has the shape that the
    optimizer gave it for its shard. An entry that is one value for the whole parameter is on every
    rank that keeps a part of the parameter.

    Raises:
        StateError: No optimizer, no state yet, or none on this rank, no such key, or `param`
            belongs to no sharded model.
    """
    return StateValue(param, "local_optimizer_state()", key).local()


def set_local_optimizer_state(param: nn.Parameter, key: str, value: Any) -> None:
    """Write this rank's part of one entry of the optimizer's state. Local.

    Raises:
        StateError: As for `local_optimizer_state`, or a value of another numel.
    """
    StateValue(param, "set_local_optimizer_state()", key).set_local(value)
