"""Whole optimizer state by parameter, and this rank's part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from zero_comm import all_gather_json, collective

from ._errors import StateError
from ._given import check_rank, copy_given, for_rank, given_value
from ._parked import StateKind
from ._placement import Placement
from ._places import Place, place_of
from ._span import Span
from ._state_entry import Entry, PlainEntry, Said, TensorEntry
from ._whole_state import ask_states, launch_entry, plan_state


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


def _keep(place: Place, state: dict[str, Any], key: str, value: Any) -> None:
    """Make it the entry: in the optimizer's own dict, or where the state rests elsewhere."""
    state[key] = value
    if place.sharded.residence.updater is not None and place.sharded.optimizer is not None:
        place.sharded.optimizer.state[place.buffer.shard_params[place.position]] = {key: value}


def _state_of(place: Place, what: str) -> dict[str, Any]:
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


def _own_state(place: Place, key: str, what: str) -> dict[str, Any]:
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


def _agree(place: Place, key: str, what: str) -> tuple[dict[str, Any], Entry]:
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


def _check_known(place: Place, key: str, known: Mapping[str, Any], what: str) -> None:
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
