"""Undo partition(): the plain model and the plain optimizer, with nothing of ours on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from zero_comm import collective

from zero_partition.chained import members_of
from zero_partition.errors import StateError
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.optimizer.entries import Entry, ask_states, launch_entry, plan_state
from zero_partition.plan.stages import Placement
from zero_partition.run.hooks import require_sharded
from zero_partition.run.sharded_model import ShardedModel, forget_places, launch_buffer
from zero_partition.run.step import bring_back_state
from zero_partition.stand_in import StateKind
from zero_partition.torch_private import plain_access

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
    sharded.refuse_while_gathered("unpartition()")
    sharded.refuse_parked("unpartition()", *StateKind)
    buffers = [buffer for unit in sharded.units for buffer in unit.buffers]
    entries = _plan_states(sharded, buffers)
    sharded.begin_write()
    if sharded.residence.updater is not None and sharded.optimizer is not None:
        bring_back_state(sharded.optimizer)
    with plain_access():
        sharded.reducer.before_forward()  # takes guards away
    for buffer, of_buffer in zip(buffers, entries, strict=True):
        if buffer.whole is None or buffer.has_masters or buffer.codec is not None:
            values = launch_buffer(buffer, buffer.trained.to(sharded.group.device))()
        else:
            values = buffer.views_of(buffer.whole)
        # Memory of their own, as before: tensors of one storage look tied to who saves them.
        buffer.install([value.clone() for value in values])
        if sharded.placements.optim is Placement.SHARDED:
            for member in members_of(sharded.optimizer):
                _return_state(buffer, of_buffer, member)
    for remove in sharded.removers:
        remove()
    sharded.removers.clear()
    sharded.residence.end()
    forget_places(sharded)
    sharded.end_write()  # backward of a graph that was made before says so


def _check_idle(sharded: ShardedModel) -> None:
    in_use = next((unit for unit in sharded.units if unit.depth), None)
    if in_use is not None:
        raise StateError(
            f"unpartition() was called while the forward of unit {in_use.name!r} is running; call "
            "it between steps"
        )
    if sharded.reducer.shards_state and any(
        g.has_local or g.is_in_flight or g.holds_gradients for g in sharded.reducer.gradients
    ):
        raise StateError(
            "unpartition() was called while sharded gradients wait for the optimizer; call "
            "optimizer.step() or optimizer.zero_grad() first"
        )


def _plan_states(
    sharded: ShardedModel, buffers: Sequence[FlatBuffer]
) -> list[list[dict[str, Entry]]]:
    """How each parameter's optimizer state lies over the ranks, by buffer. Collective."""
    optimizer = sharded.optimizer
    state = {} if optimizer is None else optimizer.state
    is_sharded = sharded.placements.optim is Placement.SHARDED
    shards = [shard for buffer in buffers for shard in buffer.shard_params]
    said = ask_states(
        [state.get(shard, {}) if is_sharded else {} for shard in shards],
        group=sharded.group,
        timeout_s=_TIMEOUT_S,
    )
    by_param = iter(zip(*said, strict=True))
    return [
        [plan_state(buffer, position, next(by_param)) for position in range(len(buffer.params))]
        for buffer in buffers
    ]


def _return_state(
    buffer: FlatBuffer, entries: Sequence[dict[str, Entry]], optimizer: torch.optim.Optimizer
) -> None:
    """Put the parameters back in the shards' place, with the whole of their state. Collective."""
    known = {id(shard) for entry in optimizer.param_groups for shard in entry["params"]}
    waits: list[tuple[nn.Parameter, dict[str, Callable[[], Any]]]] = []
    for shard, param, planned in zip(buffer.shard_params, buffer.params, entries, strict=True):
        if id(shard) in known:
            state = optimizer.state.pop(shard, {})
            of_param = {
                key: launch_entry(entry, state, key, group=buffer.group, tag=buffer.gather_tag)
                for key, entry in planned.items()
            }
            waits.append((param, of_param))
    params = dict(zip(map(id, buffer.shard_params), buffer.params, strict=True))
    for group in optimizer.param_groups:
        group["params"][:] = [params.get(id(param), param) for param in group["params"]]
    for param, of_param in waits:
        if of_param:
            optimizer.state[param] = {key: wait() for key, wait in of_param.items()}
