"""End a partition: plain objects again, or the same model ready for another partition."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from zero_comm import all_gather_json, collective

from zero_partition.chained import members_of
from zero_partition.dtensors import localized, outer_of
from zero_partition.errors import StateError
from zero_partition.init.context import guard_module
from zero_partition.init.early_shard import early_shard_of
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.nested import flat_entries, map_tensors, nested_entries
from zero_partition.optimizer.shards import (
    Entry,
    SplitEntry,
    check_optimizer,
    check_params_of,
    split_state,
)
from zero_partition.plan.stages import Placement
from zero_partition.run.hooks import find_sharded, require_sharded
from zero_partition.run.sharded_model import (
    ModelPhase,
    ParamRef,
    ShardedModel,
    launch_trained_buffer,
)
from zero_partition.run.step import restore_state
from zero_partition.run.unit import Unit
from zero_partition.stand_in import StateKind, forget_owner
from zero_partition.torch_private import plain_access, step_pre_hooks
from zero_partition.values.average import ShardedAverage
from zero_partition.values.load import names_by_owner
from zero_partition.values.runs import (
    belongs_on_device,
    launch_entry,
    owner_of,
    param_refs_in,
    plan_states,
    states_in_optimizer,
)
from zero_partition.values.value import GradValue, has_gradients

_TIMEOUT_S = 60.0


@collective
def unpartition(model: nn.Module) -> None:
    """Make the model and its optimizer plain again, with whole parameters and state. Collective.

    Afterwards every rank has all values, in memory of its own, and no hook is left: the model can
    be copied, pickled, compiled, passed on, or sharded again. The objects stay the same. Gradients
    that are there are whole in `param.grad`; those of a backward that an exception ended are
    dropped.

    Raises:
        StateError: Not sharded, a forward or backward is running, or the optimizer's state is laid
            out so that no whole of it is known; nothing was done.
        zero_comm.CommError: A rank did not take part in time.
    """
    sharded = require_sharded(model)
    with localized(model, [sharded.optimizer], lambda: find_sharded(model) is not None):
        _end(sharded, "unpartition()", keeps_shards=False)


def _end(sharded: ShardedModel, what: str, *, keeps_shards: bool) -> None:
    """Return parameters and state to the model and its optimizer. Collective.

    Args:
        sharded: The model.
        what: The call, for errors.
        keeps_shards: Leave sharded parameters as `Init` leaves them, and split their state evenly,
            for a partition that follows: no more than a flat buffer is whole at a time.
    """
    _check_idle(sharded, what)
    grads = _gather_grads(sharded)
    entries: dict[ParamRef, dict[str, Entry]] = {}
    if sharded.optimizer is None or not sharded.shards_state:
        # All ranks meet here, so that none goes on alone.
        all_gather_json(None, group=sharded.group, timeout_s=_TIMEOUT_S)
    else:
        states = states_in_optimizer(sharded, sharded.param_refs)
        entries = plan_states(sharded, states, timeout_s=_TIMEOUT_S)
        # Shards of state are freed as they are returned.
        del states
    replaced: dict[nn.Parameter, Tensor] = {}
    for buffer in sharded.buffers:
        if keeps_shards:
            buffer.adopt_values()
        replaced |= buffer.restore_memory()
        buffer.follow_writes()
    sharded.begin_write()
    if sharded.residence.offload is not None and sharded.optimizer is not None:
        restore_state(sharded.optimizer)
    with plain_access():
        sharded.reducer.begin_backward()  # takes guards away
    members = [*members_of(sharded.optimizer)]
    for unit in sharded.units:
        for buffer in unit.buffers:
            _install_values(unit, buffer, sharded, keeps_shards=keeps_shards)
            for member in members if entries else ():
                of_buffer = {param_ref: entries[param_ref] for param_ref in param_refs_in(buffer)}
                is_only = len(members) == 1
                _return_state(
                    of_buffer,
                    member,
                    is_only=is_only,
                    splits=keeps_shards,
                    was_offloaded=sharded.residence.offload is not None,
                )
    _leave(sharded)
    for param, value in replaced.items():
        param.data = value.to(param.dtype)
    for param, grad in grads.items():
        param.grad = grad.to(param.dtype)


def _install_values(
    unit: Unit, buffer: FlatBuffer, sharded: ShardedModel, *, keeps_shards: bool
) -> None:
    """Let parameters have memory of their own, or early shards in the place of it. Collective."""
    values = launch_trained_buffer(buffer)()
    if not keeps_shards or unit.placement is Placement.REPLICATED:
        # Memory of their own, as before: tensors of one storage look tied to code that saves them.
        pairs = zip(buffer.plan.params, values, strict=True)
        buffer.return_params([plan.as_given(value) for plan, value in pairs])
        return
    buffer.return_params(values)
    for param, plan, value in zip(buffer.params, buffer.plan.params, values, strict=True):
        whole = sharded.routes.of(buffer.plan).whole
        early = early_shard_of(value, plan.name, group=whole, strides=plan.strides)
        early.keep_part_of(value)
        early.install(param)


@collective
def retire_partition(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[torch.optim.Optimizer | None, dict[ShardedAverage, dict[str, SplitEntry]]]:
    """End a model's partition, if it has one, so that another can follow. Collective then.

    Sharded parameters are left as `Init` leaves them, so that no rank has more than one unit of
    them whole. With the same optimizer, state is kept, and gradients that exist are whole in
    `param.grad`. With another one, gradients are dropped, and so is the state of the optimizer
    before, which raises if it is stepped again.

    Args:
        model: The very module that was partitioned, or a plain one.
        optimizer: Of the next partition. None: that of the last, if it has one.

    Returns:
        The optimizer of the next partition, and the model's averages, which follow it there.

    Raises:
        PartitionError: The optimizer is not of this model.
        StateError: As for `unpartition`.
        zero_comm.CommError: A rank did not take part in time.
    """
    sharded = find_sharded(model)
    averages: dict[ShardedAverage, dict[str, SplitEntry]] = {}
    if sharded is not None:
        before = sharded.optimizer
        optimizer = before if optimizer is None else optimizer
        if optimizer is not None and optimizer is not before:
            check_optimizer(optimizer, model, shards_state=sharded.shards_state)
        elif before is not None:
            # A group that was added since; afterwards the model would stay as it is in between.
            check_params_of(before, names_by_owner(sharded), model)
        averages = {average: average.split() for average in [*sharded.averages]}
        if optimizer is before and before is not None:
            _end(sharded, "shard()", keeps_shards=True)
        else:
            _release(sharded)
        for module in model.modules():
            guard_module(module)
    return optimizer, averages


def _release(sharded: ShardedModel) -> None:
    """Let each rank keep its part of sharded parameters, and all of the others. Collective."""
    _check_idle(sharded, "shard()")
    sharded.drop_gradients(set_to_none=True)
    for buffer in sharded.buffers:
        buffer.adopt_values()
        buffer.follow_writes()
    sharded.begin_write()
    params = {id(owner_of(param_ref)): param_ref.param for param_ref in sharded.param_refs}
    for member in members_of(sharded.optimizer):
        member.state = defaultdict(dict)
        for group in member.param_groups:
            group["params"][:] = [params.get(id(param), param) for param in group["params"]]
        member.register_step_pre_hook(_refuse_step)
    with plain_access():
        sharded.reducer.begin_backward()  # takes guards away
    for unit in sharded.units:
        for buffer in unit.buffers:
            _install_values(unit, buffer, sharded, keeps_shards=True)
    _leave(sharded)


def _refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    raise StateError(
        f"the {type(optimizer).__name__} was stepped, but its model was sharded again with another "
        "optimizer, which has the shards now: step that one, or shard(model, optimizer) again, "
        "which begins without state"
    )


def let_step(optimizer: torch.optim.Optimizer | None) -> None:
    """Let an optimizer step again, that lost its model to another one. Local."""
    for member in members_of(optimizer):
        hooks = step_pre_hooks(member)
        for key in [key for key, hook in hooks.items() if hook is _refuse_step]:
            del hooks[key]


def _leave(sharded: ShardedModel) -> None:
    """Take all that is ours off the model and the optimizer."""
    for remove in sharded.removers:
        remove()
    sharded.removers.clear()
    sharded.residence.backends.close()
    for param_ref in sharded.param_refs:
        forget_owner(param_ref.param)
        forget_owner(outer_of(param_ref.param))
    # From here on, backward of an older graph is refused.
    sharded.end_write()


def _check_idle(sharded: ShardedModel, what: str) -> None:
    """Raise StateError if it is running; drop what a failed backward has left."""
    in_use = next((unit for unit in sharded.units if unit.depth), None)
    if in_use is not None:
        raise StateError(
            f"{what} was called while the forward of unit {in_use.name!r} is running; call it "
            "between steps"
        )
    if sharded.phase is ModelPhase.FAILED:
        sharded.drop_gradients(set_to_none=True)
    no = (ModelPhase.GATHERED, ModelPhase.BACKWARD)
    sharded.require(what, *StateKind, no=no)


def _gather_grads(sharded: ShardedModel) -> dict[nn.Parameter, Tensor]:
    """Return the whole gradients that there are, each in memory of its own. Collective."""
    if not has_gradients(sharded):
        return {}
    param_refs = [param_ref for param_ref in sharded.param_refs if param_ref.is_trainable]
    waits = {p.param: GradValue(p.param, "unpartition()").launch() for p in param_refs}
    return {param: wait() for param, wait in waits.items() if wait is not None}


def _return_state(
    entries: Mapping[ParamRef, dict[str, Entry]],
    optimizer: torch.optim.Optimizer,
    *,
    is_only: bool,
    splits: bool,
    was_offloaded: bool,
) -> None:
    """Put parameters back in the shards' place, with their state, whole or split. Collective.

    Offloaded state is on the host by now. Whole, it goes to the device on which torch would have
    it; split, only when it is whole again, since the partition that follows may offload it, too.
    """
    params = {id(owner_of(param_ref)): param_ref.param for param_ref in entries}
    known = {id(shard) for group in optimizer.param_groups for shard in group["params"]}
    # A parameter that has left the groups keeps its state, as in plain torch.
    if is_only:
        known = {id(owner_of(param_ref)) for param_ref in entries}
    for group in optimizer.param_groups:
        group["params"][:] = [params.get(id(param), param) for param in group["params"]]
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    ranks = next(iter(entries)).group
    waits: list[tuple[nn.Parameter, dict[str, Callable[[], Any]]]] = []
    for param_ref, planned in entries.items():
        shard = owner_of(param_ref)
        state = flat_entries(optimizer.state.pop(shard, {}))
        if id(shard) in known:
            of_param = {
                key: launch_entry(param_ref, key, entry, state) for key, entry in planned.items()
            }
            waits.append((param_ref.param, of_param))
    for param, of_param in waits:
        if of_param:
            whole = {key: wait() for key, wait in of_param.items()}
            devices = {}
            if was_offloaded:
                # The parameter may have left the groups.
                group = group_of.get(id(param), {})
                devices = {key: ranks.device for key in whole if belongs_on_device(key, group)}
            if splits:
                whole = split_state(whole, ranks, devices)
            else:
                for key, device in devices.items():
                    whole[key] = map_tensors(whole[key], lambda t, to=device: t.to(to))
            optimizer.state[param] = nested_entries(whole)
