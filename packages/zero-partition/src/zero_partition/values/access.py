"""What must not be in a model when it is sharded: wrappers, memory that is shared or lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any, Final, Protocol

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from zero_comm import all_gather_json, broadcast_flat, collective

from zero_partition.errors import LostEditError, PartitionError, StateError
from zero_partition.optimizer.entries import (
    Entry,
    PlainEntry,
    Said,
    TensorEntry,
    ask_states,
    launch_entry,
    plan_state,
)
from zero_partition.plan.layout import Span
from zero_partition.plan.stages import Placement
from zero_partition.run.gradients import BufferGradients
from zero_partition.run.sharded_model import (
    ParamRef,
    find_place,
    launch_whole,
    part_of,
    place_of,
    refuse_parked_values,
    write_whole,
)
from zero_partition.run.unit import ShardState
from zero_partition.stand_in import StateKind
from zero_partition.torch_private import plain_access

_WITHOUT: Final = "pass the model as it is before that: shard() does what it is for"
_WRAPPERS: Final = {
    "DistributedDataParallel": "pass the model inside it, ddp.module: shard() averages gradients",
    "DataParallel": "pass the model inside it, its .module, on one rank per device",
    "FullyShardedDataParallel": _WITHOUT,
    "FSDPModule": f"{_WITHOUT}, and fully_shard() has changed this one",
}


def check_not_wrapped(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise PartitionError for what others have wrapped to train on several ranks. Local.

    By the names of classes: nothing is imported for it.
    """
    for name, module in model.named_modules():
        where = f"module {name!r} of the model" if name else "the model"
        for kind in type(module).__mro__:
            if kind.__module__.startswith("torch.") and kind.__name__ in _WRAPPERS:
                raise PartitionError(
                    f"{where} is wrapped by torch's {kind.__name__}; {_WRAPPERS[kind.__name__]}"
                )
        own = vars(module)
        if "_is_accelerate_prepared" in own or {"_original_forward", "forward"} <= own.keys():
            raise PartitionError(
                f"{where} comes from Accelerator.prepare(); shard() the model and the optimizer in "
                "place of preparing them, and prepare only what else there is"
            )
    for name, param in model.named_parameters():
        if type(param).__name__ == "DTensor":
            raise PartitionError(
                f"parameter {name!r} is a DTensor, which fully_shard() or parallelize_module() has "
                "made: pass the model as it is before that; for tensor parallelism, shard() takes "
                "the group of data-parallel ranks and plain tensors"
            )
    if type(optimizer).__module__.startswith("accelerate."):
        raise PartitionError(
            f"the optimizer is wrapped by Accelerator.prepare() in an {type(optimizer).__name__}; "
            "pass the one inside, optimizer.optimizer, and the model as it is before prepare()"
        )


def check_content(model: nn.Module) -> None:
    """Raise PartitionError where parameters have no memory yet, or share it with others. Local."""
    owners: dict[int, str] = {}
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise PartitionError(
                f"parameter {name!r} of a lazy module has no shape yet; run one forward of the "
                "model before building the optimizer and calling shard()"
            )
        _check_place(name, param)
        if param.layout is torch.strided and param.numel() and not param.is_meta:
            owners[param.untyped_storage().data_ptr()] = name
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided or not buffer.numel() or buffer.is_meta:
            continue
        owner = owners.get(buffer.untyped_storage().data_ptr())
        if owner is not None:
            raise PartitionError(
                f"buffer {name!r} is a view of parameter {owner!r}, whose values move into a flat "
                "buffer: it would keep those of today for ever. Compute it in forward, or give it "
                "memory of its own with .clone()"
            )


def _check_place(name: str, param: nn.Parameter) -> None:
    place = find_place(param)
    if place is None:
        return
    try:
        owner = type(place.sharded.model).__name__
    except StateError:
        return  # that model is gone
    raise PartitionError(
        f"parameter {name!r} belongs to a sharded {owner} already, as {place.name!r}, and can have "
        "one optimizer and one place; shard the models that share it as one nn.Module"
    )


# ---- What was done to parameters while a context kept them whole ----


class Shaped(Protocol):
    """What a parameter must be like again."""

    @property
    def shape(self) -> torch.Size:
        """Of all of it."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        ...


class Verdict(IntEnum):
    """How a rank leaves a parameter, or the context; it can travel as a byte."""

    FINE = 0
    EDITED = 1  # though nobody was to
    MISSHAPEN = 2
    RAISED = 3  # an exception passes through the context


@define(eq=False)
class Watch:
    """Remembers what parameters were like when a context was entered."""

    compares_bytes: bool  # costs a pass over them, and finds writes that autograd does not count
    _versions: dict[tuple[int, int, int], int] = field(factory=dict, init=False)
    _sums: dict[tuple[int, int, int], int] = field(factory=dict, init=False)

    def start(self, places: Iterable[ParamRef]) -> None:
        """From here on writes count."""
        for place in places:
            self._versions[place.key] = _version_of(place)
            if self.compares_bytes:
                self._sums[place.key] = sum_of(data_of(place))

    def judge(self, place: ParamRef, *, may_edit: bool) -> Verdict:
        """What has become of a parameter."""
        data, value = data_of(place), home_of(place)
        if data.shape != value.shape or data.dtype != value.dtype or data.device != value.device:
            return Verdict.MISSHAPEN
        if may_edit:
            return Verdict.FINE
        is_same = data.data_ptr() == value.data_ptr() and data.is_contiguous()
        is_same = is_same and _version_of(place) == self._versions[place.key]
        if is_same and self.compares_bytes:
            is_same = sum_of(data) == self._sums[place.key]
        return Verdict.FINE if is_same else Verdict.EDITED


def raise_on(
    verdict: Verdict,
    name: str,
    expected: Shaped,
    *,
    seen_on: int,
    rank: int,
    modifier: int | None,
    what: str,
) -> None:
    """Raise what a verdict of `rank` means for everyone, if anything."""
    mine = f"(seen on rank {seen_on})"
    if verdict is Verdict.RAISED:
        raise StateError(
            f"{what}: rank {rank} left the context with an exception {mine}, so all changes are "
            "dropped; its own message says why"
        )
    if verdict is Verdict.EDITED:
        raise LostEditError(
            f"{what}: rank {rank} changed parameter {name!r} {mine}; without modifier_rank "
            "changes are dropped. Pass modifier_rank=... to keep those of one rank, or change a "
            "copy"
        )
    if verdict is Verdict.MISSHAPEN and modifier in (None, rank):
        raise StateError(
            f"{what}: rank {rank} left parameter {name!r} with another shape, dtype or "
            f"device {mine}; expected shape {tuple(expected.shape)}, {expected.dtype}. A sharded "
            "model keeps its shapes: change them before shard()"
        )


def home_of(place: ParamRef) -> Tensor:
    """The memory in which a parameter that is gathered, or rests whole, belongs."""
    buffer = place.buffer
    if place.position in buffer.held:
        return buffer.held[place.position]
    assert buffer.whole is not None, "neither gathered nor replicated"
    return buffer.views_of(buffer.whole)[place.position]


def data_of(place: ParamRef) -> Tensor:
    """The memory that a parameter views now, whatever was done to it."""
    with plain_access():
        return place.buffer.params[place.position].data


def _version_of(place: ParamRef) -> int:
    with plain_access():
        return place.buffer.params[place.position]._version


def sum_of(data: Tensor) -> int:
    """Over the bits, so that NaN is a value like others."""
    data = torch.view_as_real(data) if data.is_complex() else data
    return int(data.contiguous().view(_INTEGERS[data.element_size()]).sum(dtype=torch.int64))


_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# ---- What users give to be written, checked ----


def for_rank(place: ParamRef, value: Any, to_rank: int | None) -> Any:
    """The value on the rank that wants it, on all when None; None elsewhere."""
    return value if to_rank in (None, place.whole.rank) else None


def check_rank(place: ParamRef, from_rank: int | None, what: str) -> None:
    """Raise StateError unless it is a rank of the group, or None."""
    group = place.whole
    if from_rank is not None and not 0 <= from_rank < group.world_size:
        raise StateError(
            f"{what}: expected from_rank in 0..{group.world_size - 1}, got {from_rank} (rank "
            f"{group.rank})"
        )


def given_value(
    place: ParamRef,
    value: Any,
    expected: tuple[torch.Size, torch.dtype],
    from_rank: int | None,
    what: str,
) -> Tensor:
    """The whole value that every rank is to write, checked on all. Collective with `from_rank`.

    Args:
        place: Of which parameter it is.
        value: What the user passed on this rank.
        expected: The shape that it must have, and the dtype to give it.
        from_rank: Whose value counts; each rank's own when None.
        what: What the user called.
    """
    (shape, dtype), group = expected, place.whole
    check_rank(place, from_rank, what)
    got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    if from_rank is not None:
        got = all_gather_json(got, group=group, tag=place.sharded.access_tag)[from_rank]
    if got != f"shape {tuple(shape)}":
        whose = group.rank if from_rank is None else from_rank
        raise StateError(
            f"{what}: parameter {place.name!r}: expected a tensor of shape {tuple(shape)}, got "
            f"{got} on rank {whose} (seen on rank {group.rank})"
        )
    if from_rank is None:
        return value.detach().as_subclass(Tensor).to(group.device, dtype)
    whole = torch.empty(shape, dtype=dtype, device=group.device)
    if group.rank == from_rank:
        whole.copy_(value.detach())
    if whole.numel():
        broadcast_flat(whole.view(-1).view(torch.uint8), src=from_rank, group=group).wait()
    return whole


def copy_given(place: ParamRef, part: Tensor, value: Any, what: str) -> None:
    """Write what was given as this rank's part into that part. Local."""
    if not isinstance(value, Tensor) or value.numel() != part.numel():
        got = f"{value.numel()} elements" if isinstance(value, Tensor) else repr(value)
        raise StateError(
            f"{what}: parameter {place.name!r}: expected this rank's part, a tensor of "
            f"{part.numel()} elements, got {got} (rank {place.whole.rank})"
        )
    with torch.no_grad():
        part.copy_(value.detach().view(part.shape))


# ---- Whole gradients by parameter, and this rank's parts of them ----


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


def _gradients_of(place: ParamRef) -> BufferGradients | None:
    gradients = place.sharded.reducer.gradients
    return next((g for g in gradients if g.buffer is place.buffer), None)


def _check_grads(place: ParamRef, what: str) -> None:
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


def _launch_grad(place: ParamRef, what: str) -> Callable[..., Tensor] | None:
    _check_grads(place, what)
    g, position, reducer = _gradients_of(place), place.position, place.sharded.reducer
    if g is None:
        return None
    with plain_access():
        if not reducer.sync:
            return g.views[position].clone if position in g.filled else None
        grad = g.targets[position].grad
        if grad is None:
            return None
        if not g.shards_state:
            return grad.detach().clone
        part = grad.as_subclass(Tensor).detach().view(-1)
        return launch_whole(place, part.to(place.group.device))


def _local_grad(place: ParamRef, what: str) -> Tensor | None:
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


# ---- Whole values by parameter, this rank's parts of them, and where they lie ----


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


def _check_free(place: ParamRef, what: str) -> None:
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


def _part_or_whole(place: ParamRef) -> Tensor:
    if place.sharded.placements.optim is Placement.SHARDED:
        return part_of(place, place.buffer.trained)
    assert place.buffer.whole is not None, "replicated parameters have a whole buffer"
    return place.buffer.views_of(place.buffer.whole)[place.position]


# ---- Whole optimizer state by parameter, and this rank's part of it ----


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
    place = place_of(param, what=what)
    state, entry = _agree(place, key, what)
    if place.sharded.placements.optim is Placement.REPLICATED:
        return for_rank(place, _copy_of(state[key]), to_rank)
    tag = place.sharded.access_tag
    whole = launch_entry(entry, state, key, group=place.group, tag=tag)()
    return for_rank(place, whole, to_rank)


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
    place = place_of(param, what=what)
    check_rank(place, from_rank, what)
    state, entry = _agree(place, key, what)
    if isinstance(entry, PlainEntry):
        if from_rank is not None:
            own = value if place.whole.rank == from_rank else None
            tag = place.sharded.access_tag
            value = all_gather_json(own, group=place.whole, tag=tag)[from_rank]
        if key in state:
            _keep(place, state, key, value)
        return
    assert isinstance(entry, TensorEntry), "what has no whole was refused"
    if isinstance(value, int | float) and not entry.shape:
        value = torch.tensor(value, dtype=entry.dtype)
    whole = given_value(place, value, (entry.shape, entry.dtype), from_rank, what)
    span = entry.spans[place.group.rank]
    if span.numel:
        part = whole.reshape(-1)[span.as_slice()].view(state[key].shape)
        _keep(place, state, key, state[key].copy_(part))


def local_optimizer_state(param: nn.Parameter, key: str) -> Any:
    """This rank's part of one entry of the optimizer's state, in the optimizer's shape. Local.

    That is 1-D and even where the cut is flat, and whatever the optimizer made of its shard
    elsewhere; what is one value for the whole parameter is on every rank that keeps a part of it.

    Raises:
        StateError: No optimizer, no state yet, or none on this rank, no such key, or `param`
            belongs to no sharded model.
    """
    what = "local_optimizer_state()"
    return _copy_of(_own_state(place_of(param, what=what), key, what)[key])


def set_local_optimizer_state(param: nn.Parameter, key: str, value: Any) -> None:
    """Write this rank's part of one entry of the optimizer's state. Local.

    Raises:
        StateError: As for `local_optimizer_state`, or a value of another numel.
    """
    what = "set_local_optimizer_state()"
    place = place_of(param, what=what)
    state = _own_state(place, key, what)
    if not isinstance(state[key], Tensor):
        _keep(place, state, key, value)
        return
    if isinstance(value, int | float) and not state[key].dim():
        value = torch.tensor(value)
    copy_given(place, state[key], value, what)
    _keep(place, state, key, state[key])


def _copy_of(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _keep(place: ParamRef, state: dict[str, Any], key: str, value: Any) -> None:
    """Make it the entry: in the optimizer's own dict, or where the state rests elsewhere."""
    state[key] = value
    if place.sharded.residence.offload is not None and place.sharded.optimizer is not None:
        place.sharded.optimizer.state[place.buffer.shard_params[place.position]] = {key: value}


def _state_of(place: ParamRef, what: str) -> dict[str, Any]:
    """This rank's state of the parameter, empty where it has none. Local."""
    place.sharded.refuse_parked(what, StateKind.OPTIM)
    optimizer = place.sharded.optimizer
    if optimizer is None:
        raise StateError(
            f"{what}: the model was sharded without an optimizer (rank {place.whole.rank})"
        )
    is_sharded = place.sharded.placements.optim is Placement.SHARDED
    targets = place.buffer.shard_params if is_sharded else place.buffer.params
    return optimizer.state.get(targets[place.position], {})


def _own_state(place: ParamRef, key: str, what: str) -> dict[str, Any]:
    state = _state_of(place, what)
    is_sharded = place.sharded.placements.optim is Placement.SHARDED
    if not state and is_sharded and place.piece is None:
        raise StateError(
            f"{what}: rank {place.whole.rank} keeps no part of parameter {place.name!r}, and its "
            "optimizer no state of it; local_param(param) is empty there, and "
            "full_optimizer_state(param, key) asks the others"
        )
    _check_known(place, key, state, what)
    return state


def _agree(place: ParamRef, key: str, what: str) -> tuple[dict[str, Any], Entry]:
    """This rank's state of the parameter, and how the entry lies over all ranks. Collective."""
    state, group = _state_of(place, what), place.group
    if place.sharded.placements.optim is Placement.REPLICATED:
        _check_known(place, key, state, what)
        return state, _on_every_rank(state[key], group.world_size)
    answers = ask_states([state], group=group, tag=place.sharded.access_tag)
    said = [of_rank[0] for of_rank in answers]
    known = {name: None for of_rank in said for name in of_rank}
    _check_known(place, key, known, what)
    chosen = [{name: one for name, one in of.items() if name == key} for of in said]
    try:
        return state, plan_state(place.buffer, place.position, chosen)[key]
    except StateError as error:
        raise StateError(f"{what}: {error} (seen on rank {group.rank})") from error


def _on_every_rank(value: Any, world_size: int) -> Entry:
    said = Said.of(value)
    if not isinstance(value, Tensor):
        return PlainEntry(said.number)
    spans = (Span(0, value.numel()),) * world_size
    return TensorEntry(value.shape, value.dtype, said.is_on_host, spans)


def _check_known(place: ParamRef, key: str, known: Mapping[str, Any], what: str) -> None:
    rank = place.whole.rank
    if not known:
        raise StateError(
            f"{what}: the optimizer has no state for parameter {place.name!r} (rank {rank}): it is "
            "frozen or in no param group, or no step has had a gradient for it yet"
        )
    if key not in known:
        raise StateError(
            f"{what}: parameter {place.name!r}: expected one of {sorted(known)}, got {key!r} (rank "
            f"{rank})"
        )
