"""Values and optimizer state from elsewhere into a partitioned model: all of it, or none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from ._chained import members_of, options_of
from ._errors import LoadError, PartitionError, StateError
from ._flat_buffer import FlatBuffer
from ._load_problems import find_misfits
from ._load_target import Target, targets_of
from ._nested_state import rebuild
from ._placement import Placement
from ._probe import entries_after_step
from ._range_reader import AbstractRangeReader
from ._sharded_model import ShardedModel
from ._span import Span
from ._state_entry import keys_for_whole
from ._state_parts import own_masters_of
from ._state_target import StateTarget, fill_buffer, read_into, write_states
from ._updater import MASTER
from ._whole_state import keeps_of, spans_said

# How a step is computed is the new run's choice; these are not what is trained, but how.
_NOT_RESTORED = frozenset({"foreach", "fused", "capturable", "differentiable", "cut"})


@frozen(kw_only=True, eq=False)
class StateSource:
    """What is loaded, by names of `model.state_dict()`."""

    params: Mapping[str, AbstractRangeReader]
    buffers: Mapping[str, AbstractRangeReader]
    ties: Mapping[str, str]  # from further names to those in `params`
    may_lack: frozenset[str] | None  # parameters that were left out; None: all, and buffers
    states: Mapping[str, Mapping[str, Any]] | None  # readers and values; None: not loaded
    param_groups: Sequence[Mapping[str, Any]]  # "params": names, and options
    where: str  # that it comes from, for errors
    own_said: Mapping[str, Any] = field(factory=dict)  # as `StateParts.own_said`
    own: Mapping[int, Mapping[str, AbstractRangeReader]] = field(factory=dict)  # by rank and number


@frozen(eq=False)
class StateLoad:
    """A load that has been planned: nothing is written yet."""

    sharded: ShardedModel
    source: StateSource
    readers: Sequence[tuple[FlatBuffer, Mapping[int, AbstractRangeReader]]]
    buffers: Sequence[tuple[Target, AbstractRangeReader]]
    states: Sequence[StateTarget]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    problems: tuple[str, ...]
    begins_anew: tuple[str, ...]  # state that is of other shards, each with why

    @property
    def num_tensors(self) -> int:
        """That are going to be restored, whole ones."""
        return (
            sum(len(of_buffer) for _, of_buffer in self.readers)
            + len(self.buffers)
            + sum(target.num_entries for target in self.states)
        )

    def apply(self) -> None:
        """Write all of it. Local, but every rank calls it."""
        sharded = self.sharded
        sharded.begin_write()
        with torch.no_grad():
            if self.source.states is not None:
                write_states(sharded, self.states)  # first: it mends state that is torn
            for buffer, readers in self.readers:
                fill_buffer(buffer, readers, sharded.residence.updater)
            for target, reader in self.buffers:
                _fill_module_buffer(target.tensor, reader)
        if self.source.states is not None:
            _restore_options(sharded, self.source.param_groups)
            sharded.has_stepped = sharded.has_stepped or any(t.entries for t in self.states)
        if sharded.residence.home is not None:
            sharded.residence.home.settle()
        sharded.end_write()


def plan_load(sharded: ShardedModel, source: StateSource, *, is_strict: bool) -> StateLoad:
    """Find what is read to where, and all that speaks against it. Local.

    Args:
        sharded: The model to load into.
        source: What to load.
        is_strict: Whether missing and unexpected names are problems.

    Raises:
        StateError: A forward is running, or parameters are gathered.
    """
    if any(unit.depth for unit in sharded.units):
        raise StateError("load() was called while a forward is running; call it between steps")
    sharded.refuse_while_gathered("load()")
    problems: list[str] = []
    begins_anew: list[str] = []
    names = _Names()
    readers = _plan_params(sharded, source, names, problems)
    buffers = _plan_buffers(sharded, source, names, problems)
    given = (*source.params, *source.buffers)
    unexpected = [name for name in given if name not in names.used]
    states: list[StateTarget] = []
    if source.states is not None:
        states = _plan_states(
            sharded, source, source.states, problems, begins_anew, is_strict=is_strict
        )
    if is_strict:
        for kind, which in (("missing", names.missing), ("unexpected", unexpected)):
            if which:
                problems.append(f"{kind}: {', '.join(map(repr, which))}")
    return StateLoad(
        sharded,
        source,
        readers,
        buffers,
        states,
        tuple(names.missing),
        tuple(unexpected),
        tuple(problems),
        tuple(begins_anew),
    )


@define
class _Names:
    """What the model asked for."""

    used: set[str] = field(factory=set)
    missing: list[str] = field(factory=list)


def _plan_params(
    sharded: ShardedModel, source: StateSource, names: _Names, problems: list[str]
) -> list[tuple[FlatBuffer, Mapping[int, AbstractRangeReader]]]:
    readers: list[tuple[FlatBuffer, Mapping[int, AbstractRangeReader]]] = []
    for buffer in (buffer for unit in sharded.units for buffer in unit.buffers):
        found: dict[int, AbstractRangeReader] = {}
        for position, param in enumerate(buffer.plan.params):
            known = dict.fromkeys(source.ties.get(name, name) for name in param.names)
            given = [name for name in known if name in source.params]
            names.used.update(given)
            if not given and source.may_lack is not None and param.name not in source.may_lack:
                names.missing.append(param.name)
            if len(given) > 1:
                problems.append(
                    f"{' and '.join(map(repr, given))} are one tensor here, and {len(given)} there"
                )
            for name in given[:1]:
                found[position] = source.params[name]
                problems += find_misfits(name, param.shape, param.dtype, source.params[name])
        readers.append((buffer, found))
    return readers


def _plan_buffers(
    sharded: ShardedModel, source: StateSource, names: _Names, problems: list[str]
) -> list[tuple[Target, AbstractRangeReader]]:
    buffers: list[tuple[Target, AbstractRangeReader]] = []
    for target in targets_of(sharded.model):
        if isinstance(target.tensor, nn.Parameter):
            continue
        given = target.given(source.buffers)
        names.used.update(given)
        if not given and source.may_lack is not None:
            names.missing.append(target.names[0])
        for name in given[:1]:
            reader = source.buffers[name]
            buffers.append((target, reader))
            problems += find_misfits(name, target.tensor.shape, target.tensor.dtype, reader)
    return buffers


def param_groups_of(sharded: ShardedModel) -> list[dict[str, Any]]:
    """The optimizer's param groups, with names for parameters. Local."""
    names = names_by_owner(sharded)
    groups = [] if sharded.optimizer is None else sharded.optimizer.param_groups
    return [
        {**_restored(group), "params": [names[id(param)] for param in group["params"]]}
        for group in groups
    ]


def names_by_owner(sharded: ShardedModel) -> dict[int, str]:
    """Of parameters, by the id of what the optimizer has of them. Local."""
    is_sharded = sharded.placements.optim is Placement.SHARDED
    return {
        id(owner): plan.name
        for unit in sharded.units
        for buffer in unit.buffers
        for owner, plan in zip(
            buffer.shard_params if is_sharded else buffer.params, buffer.plan.params, strict=True
        )
    }


def _restored(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options_of(group).items() if key not in _NOT_RESTORED}


def _restore_options(sharded: ShardedModel, given: Sequence[Mapping[str, Any]]) -> None:
    groups = [] if sharded.optimizer is None else sharded.optimizer.param_groups
    for group, options in zip(groups, given, strict=False):
        for key, value in _restored(options).items():
            live = group.get(key)
            if isinstance(live, Tensor):  # as a compiled or captured step has it
                live.copy_(torch.as_tensor(value))
            elif isinstance(value, Tensor):
                group[key] = value.clone()
            else:
                group[key] = value


def _plan_states(
    sharded: ShardedModel,
    source: StateSource,
    given: Mapping[str, Mapping[str, Any]],
    problems: list[str],
    begins_anew: list[str],
    *,
    is_strict: bool,
) -> list[StateTarget]:
    if sharded.optimizer is None:
        raise LoadError(f"{source.where}: the model was sharded without an optimizer to load into")
    mine = param_groups_of(sharded)
    aliases = {
        alias: plan.name
        for unit in sharded.units
        for buffer in unit.buffers
        for plan in buffer.plan.params
        for alias in plan.names
    }
    theirs = [
        [aliases.get(name, name) for name in group["params"]] for group in source.param_groups
    ]
    if is_strict and theirs != [group["params"] for group in mine]:
        problems.append(_describe_groups(mine, theirs))
    state_by_name = {aliases.get(name, name): state for name, state in given.items()}
    own_said = {aliases.get(name, name): said for name, said in source.own_said.items()}
    own_entries = {
        aliases.get(n, n): o for n, o in _own_entries(source, sharded.group.rank).items()
    }
    params_by_name = {aliases.get(name, name): reader for name, reader in source.params.items()}
    trained = {name for group in mine for name in group["params"]}
    extra = [name for name in state_by_name if name not in trained]
    if extra and is_strict:
        problems.append(f"optimizer state of {', '.join(map(repr, extra))}, which is not trained")
    expected = _expected_entries(sharded, source)
    for_whole = keys_for_whole(
        (plan.shape, state_by_name.get(plan.name, {}))
        for unit in sharded.units
        for buffer in unit.buffers
        for plan in buffer.plan.params
    )
    targets = []
    for buffer in (buffer for unit in sharded.units for buffer in unit.buffers):
        for position, plan in enumerate(buffer.plan.params):
            if plan.name not in trained:
                continue
            target = StateTarget(buffer, position)
            state = dict(state_by_name.get(plan.name, {}))
            own = own_said.get(plan.name, {"entries": {}})
            if own["entries"] and not _is_kept_here(own["keeps"], sharded, target):
                begins_anew.append(
                    f"optimizer state of {plan.name!r}: {', '.join(map(repr, own['entries']))} of "
                    "it has no whole, and was saved by ranks that keep other parts of the parameter"
                )
                state, own = {}, {"entries": {}}
            num_entries = len(state)
            if state and plan.name in params_by_name and own_masters_of(sharded, buffer):
                state.setdefault(MASTER, params_by_name[plan.name])  # as a file has them
            try:
                target.plan(state, sharded.placements.optim, for_whole)
                target.num_entries = num_entries
                if own["entries"]:
                    target.add_own(own_entries[plan.name])
            except PartitionError as error:
                problems.append(str(error))
            known = state.keys() | own["entries"].keys()
            lacking = sorted(expected.get(plan.name, frozenset()) - known) if known else []
            if lacking and is_strict:
                problems.append(f"{plan.name!r}: optimizer state lacks {', '.join(lacking)}")
            targets.append(target)
    return targets


def _is_kept_here(saved: Sequence[Any], sharded: ShardedModel, target: StateTarget) -> bool:
    """Whether each rank keeps the same elements of the parameter as the one that saved it."""
    is_sharded = sharded.placements.optim is Placement.SHARDED
    return is_sharded and spans_said(keeps_of(target.buffer, target.position)) == list(saved)


def _own_entries(source: StateSource, rank: int) -> dict[str, dict[str, Any]]:
    """What this rank had of entries without a whole, by the names that were saved."""
    readers = source.own.get(rank, {})
    in_order = (readers[str(number)] for number in range(len(readers)))
    return {
        name: {
            key: rebuild(of_rank[rank], in_order)
            for key, of_rank in said["entries"].items()
            if rank < len(of_rank) and of_rank[rank] is not None
        }
        for name, said in source.own_said.items()
    }


def _describe_groups(mine: Sequence[Mapping[str, Any]], theirs: Sequence[Sequence[str]]) -> str:
    own = [group["params"] for group in mine]
    if len(own) != len(theirs):
        return f"expected {len(own)} param groups, got {len(theirs)}"
    for index, (names, others) in enumerate(zip(own, theirs, strict=True)):
        lacking = [name for name in names if name not in others]
        extra = [name for name in others if name not in names]
        if lacking or extra:
            return (
                f"param group {index}: expected also {lacking}, and not {extra}; is it the "
                "optimizer of the same parameters?"
            )
    return "param groups hold the same parameters in another order"


def _expected_entries(sharded: ShardedModel, source: StateSource) -> dict[str, frozenset[str]]:
    """What a step leaves as state of each parameter, where a trial on a tiny one shows it."""
    names, given = names_by_owner(sharded), iter(source.param_groups)
    num_dims = {
        plan.name: len(plan.shape)
        for unit in sharded.units
        for buffer in unit.buffers
        for plan in buffer.plan.params
    }
    expected: dict[str, frozenset[str]] = {}
    for member in members_of(sharded.optimizer):
        in_group = [[names[id(param)] for param in g["params"]] for g in member.param_groups]
        dims = [sorted({num_dims[name] for name in of_group}) for of_group in in_group]
        options = [_restored(next(given, {})) for _ in member.param_groups]
        found = entries_after_step(member, dims, options)
        for of_group, entries in zip(in_group, found, strict=True):
            expected |= {
                name: entries[num_dims[name]] for name in of_group if num_dims[name] in entries
            }
    return expected


def _fill_module_buffer(tensor: Tensor, reader: AbstractRangeReader) -> None:
    if tensor.is_contiguous():
        read_into(tensor.view(-1), reader, Span(0, tensor.numel()))
    else:
        tensor.copy_(reader.read(0, math.prod(reader.shape)).view(tensor.shape))
