"""Undo partition(): the plain model and the plain optimizer, with nothing of ours on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from zero_comm import all_gather_json, collective

from zero_partition.chained import members_of
from zero_partition.errors import StateError
from zero_partition.optimizer.shards import Entry
from zero_partition.run.hooks import require_sharded
from zero_partition.run.sharded_model import (
    ModelPhase,
    ParamRef,
    ShardedModel,
    launch_trained_buffer,
)
from zero_partition.run.step import bring_back_state
from zero_partition.stand_in import StateKind, forget_owner
from zero_partition.torch_private import plain_access

from .runs import launch_entry, owner_of, places_in, plan_states

_TIMEOUT_S = 60.0


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
    sharded = require_sharded(model)
    _check_idle(sharded)
    sharded.require("unpartition()", *StateKind, no=(ModelPhase.GATHERED,))
    for buffer in sharded.buffers:
        buffer.follow_writes()
    entries: dict[ParamRef, dict[str, Entry]] = {}
    if sharded.optimizer is None or not sharded.shards_state:
        all_gather_json(None, group=sharded.group, timeout_s=_TIMEOUT_S)  # no rank goes alone
    else:
        states = [sharded.optimizer.state.get(owner_of(p), {}) for p in sharded.places]
        planned = plan_states(sharded, sharded.places, states, timeout_s=_TIMEOUT_S)
        entries = dict(zip(sharded.places, planned, strict=True))
    sharded.begin_write()
    if sharded.residence.offload is not None and sharded.optimizer is not None:
        bring_back_state(sharded.optimizer)
    with plain_access():
        sharded.reducer.begin_backward()  # takes guards away
    for buffer in sharded.buffers:
        # Memory of their own, as before: tensors of one storage look tied to who saves them.
        buffer.install([value.clone() for value in launch_trained_buffer(buffer)()])
        for member in members_of(sharded.optimizer) if entries else ():
            _return_state({place: entries[place] for place in places_in(buffer)}, member)
    for remove in sharded.removers:
        remove()
    sharded.removers.clear()
    sharded.residence.homes.close()
    for place in sharded.places:
        forget_owner(place.param)
    sharded.end_write()  # backward of a graph that was made before says so


def _check_idle(sharded: ShardedModel) -> None:
    in_use = next((unit for unit in sharded.units if unit.depth), None)
    if in_use is not None:
        raise StateError(
            f"unpartition() was called while the forward of unit {in_use.name!r} is running; call "
            "it between steps"
        )
    if sharded.reducer.shards_state and any(
        g.has_local or g.reduction is not None or g.holds_gradients
        for g in sharded.reducer.gradients
    ):
        raise StateError(
            "unpartition() was called while sharded gradients wait for the optimizer; call "
            "optimizer.step() or optimizer.zero_grad() first"
        )


def _return_state(
    entries: Mapping[ParamRef, dict[str, Entry]], optimizer: torch.optim.Optimizer
) -> None:
    """Put parameters back in the shards' place, with the whole of their state. Collective."""
    params = {id(owner_of(place)): place.param for place in entries}
    known = {id(shard) for group in optimizer.param_groups for shard in group["params"]}
    for group in optimizer.param_groups:
        group["params"][:] = [params.get(id(param), param) for param in group["params"]]
    waits: list[tuple[nn.Parameter, dict[str, Callable[[], Any]]]] = []
    for place, planned in entries.items():
        if id(shard := owner_of(place)) in known:
            state = optimizer.state.pop(shard, {})
            tag = place.buffer.gather_tag
            of_param = {
                key: launch_entry(entry, state, key, group=place.group, tag=tag)
                for key, entry in planned.items()
            }
            waits.append((place.param, of_param))
    for param, of_param in waits:
        if of_param:
            optimizer.state[param] = {key: wait() for key, wait in of_param.items()}
