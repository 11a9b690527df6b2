"""Whole gradients by parameter, and this rank's parts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from zero_comm import collective

from ._errors import StateError
from ._given import copy_given, for_rank, given_value
from ._gradients import BufferGradients
from ._parked import StateKind
from ._places import Place, place_of
from ._torch_compat import plain_access
from ._whole import launch_whole


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
    place = place_of(param, what="full_grad()")
    wait = _launch_grad(place, "full_grad()")
    return None if wait is None else for_rank(place, wait(), to_rank)


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
    place = place_of(param, what=what)
    plan = place.buffer.plan.params[place.position]
    whole = given_value(place, value, (plan.shape, plan.dtype), from_rank, what)
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
            f"{place.whole.rank}); set_full_grad() makes one"
        )
    copy_given(place, part, value, "set_local_grad()")


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


def _gradients_of(place: Place) -> BufferGradients | None:
    gradients = place.sharded.reducer.gradients
    return next((g for g in gradients if g.buffer is place.buffer), None)


def _check_grads(place: Place, what: str) -> None:
    """Reduce what no_sync left; raise where there can be no gradients."""
    sharded, reducer = place.sharded, place.sharded.reducer
    sharded.refuse_parked(what, StateKind.GRADS)
    if sharded.is_backward_open:
        raise StateError(
            f"{what}: a backward is running, or an exception ended it (rank {place.whole.rank}); "
            "gradients are there when backward() has returned"
        )
    with plain_access():
        if reducer.sync:
            reducer.before_step()
        has_any = any(g.has_local or g.holds_gradients for g in reducer.gradients)
    if not has_any:
        raise StateError(
            f"{what}: parameter {place.name!r}: there are no gradients now (rank "
            f"{place.whole.rank}); they are there from the end of loss.backward() until "
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
        part = grad.as_subclass(Tensor).detach().view(-1)
        return launch_whole(place, part.to(place.group.device))


def _local_grad(place: Place, what: str) -> Tensor | None:
    reducer, g = place.sharded.reducer, _gradients_of(place)
    if any(other.has_local for other in reducer.gradients):
        raise StateError(
            f"{what}: parameter {place.name!r}: inside no_sync, and until the gradients it left "
            f"are reduced, no rank has its part (rank {place.whole.rank}); call full_grad(param)"
        )
    _check_grads(place, what)
    with plain_access():
        grad = None if g is None else g.targets[place.position].grad
    return None if grad is None else grad.as_subclass(Tensor).view(-1)
