"""Whole weights and optimizer state, by torch's names and in its formats: given and loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, count, groupby, repeat
from typing import Any, Final, final
from weakref import WeakValueDictionary

import torch
from attrs import define, evolve, field
from torch import Tensor, nn
from zero_comm import Group, all_gather_json, broadcast_flat, collective
from zero_comm.calls import in_lines

from zero_partition.chained import (
    ChainedOptimizer,
    extra_entries,
    members_of,
    shared_state,
    with_state_dict_hooks,
)
from zero_partition.dtensors import (
    is_dtensor,
    like,
    local_of,
    outer_of,
    part_of_whole,
    plain_of,
    whole_over_mesh,
)
from zero_partition.errors import LoadError, StateError
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.memory.seams import MASTER, AbstractRangeReader
from zero_partition.nested import (
    describe,
    described_tensors,
    flat_entries,
    is_wrapper,
    map_tensors,
    nested_entries,
    rebuild,
)
from zero_partition.optimizer.shards import check_params_of, leave_state, watch_state
from zero_partition.plan.layout import Span
from zero_partition.plan.stages import Placement, shown_all
from zero_partition.run.hooks import require_sharded
from zero_partition.run.sharded_model import (
    ModelPhase,
    ParamRef,
    ShardedModel,
    launch_buffer,
    launch_trained_buffer,
    param_ref_of,
)
from zero_partition.run.unit import ShardState, Unit
from zero_partition.stand_in import Bound, NameOnly, StateKind, end_export, export
from zero_partition.torch_private import checkpoint_call

from .load import StateLoad, StateSource, names_by_owner, param_groups_of, plan_load
from .runs import LocalState, launch_entry, owner_of, plan_states

_TIMEOUT_S: Final = 60.0

# NOTE(masters): torch's format has no place for the values that an optimizer updates beside rounded
# parameters, and weights alone would lose what was rounded away. They lie beside "state", where
# torch's `load_state_dict()` does not look: a parameter may have a master, and no state.


@collective
def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The whole model's `state_dict`, on rank 0, in host memory. Collective.

    At most one unit is whole at a time on the other ranks. Keys, buffers and extra state are what
    the model's own `state_dict` gives; tied parameters share one tensor. A delayed update is
    finished first, as by `finish_update`, so that weights and optimizer state are of one step.

    Returns:
        The state dict on rank 0, an empty dict on other ranks.

    Raises:
        StateError: Not sharded, a forward is running, or at stage 3 a state_dict hook of the model
            computes with the values of parameters.
    """
    return gather_state_dict(require_sharded(model))


def gather_state_dict(
    sharded: ShardedModel, shards: Mapping[FlatBuffer, Tensor] | None = None
) -> dict[str, Any]:
    """Return what `full_state_dict` does, with the values `shards` for some buffers. Collective."""
    sharded.require("full_state_dict()", StateKind.PARAMS, no=(ModelPhase.FORWARD,))
    sharded.refuse_own_ranks("full_state_dict()")
    sharded.compare_launches("full_state_dict()", at_once=True)
    sharded.follow_shard_writes()
    sharded.finish_update()
    is_first = sharded.whole.rank == 0
    if sharded.is_exact and shards is None:
        state = sharded.model.state_dict() if is_first else {}
        copies: dict[Any, Tensor] = {}
        return {key: _to_host(value, copies) for key, value in state.items()}
    sharded.schedule.wait_for_gathers()
    with sharded.exporting({}):
        state = sharded.model.state_dict()
    # Id of a parameter -> its value, in host memory.
    values: dict[int, Tensor] = {}
    for unit in sharded.units:
        # Rank 0 reads the shards of such a unit from the peers' memory.
        if not is_first and unit.exposure is not None and shards is None:
            continue
        for param, value in _exact_values(unit, sharded, shards or {}):
            if is_first:
                whole = whole_over_mesh(param, value.detach())
                values[id(outer_of(param))] = whole.to("cpu", copy=True)
        unit.reshard()
    # No rank leaves before rank 0 has read its shards.
    if sharded.exposure is not None:
        sharded.exposure.begin_write("full_state_dict(), until rank 0 has read all shards")
        sharded.exposure.end_write()
    if not is_first:
        return {}
    copies = {_memory_of(p): values[id(p)] for p in sharded.model.parameters() if id(p) in values}
    return {
        # Found by object or by memory, since hooks may have renamed entries of the state dict.
        key: values[id(value.param)] if isinstance(value, NameOnly) else _to_host(value, copies)
        for key, value in state.items()
    }


def _exact_values(
    unit: Unit, sharded: ShardedModel, shards: Mapping[FlatBuffer, Tensor]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield a unit's parameters with whole, exact values. Collective.

    Slots get what a codec has rounded, so values of a unit with a codec are gathered besides.
    """
    if unit.codec is None:
        unit.unshard(sharded.schedule.pool)
    for buffer in unit.buffers:
        values: Iterable[Tensor] = buffer.params
        if buffer in shards:
            values = launch_buffer(buffer, shards[buffer].to(sharded.group.device))()
        elif unit.codec is not None:
            values = launch_buffer(buffer)()
        yield from zip(buffer.params, values, strict=True)


def _to_host(value: Any, copies: dict[Any, Tensor]) -> Any:
    """A copy in host memory; one for all tensors that are the same memory, such as tied ones."""
    if not isinstance(value, Tensor):
        return value
    key = _memory_of(value)
    if key not in copies:
        copies[key] = plain_of(value.detach()).to("cpu", copy=True)
    return copies[key]


def _memory_of(tensor: Tensor) -> Any:
    memory = local_of(tensor)
    if not memory.numel() or memory.layout is not torch.strided or is_wrapper(memory):
        return id(tensor)
    return memory.data_ptr(), memory.shape, memory.stride()


def install_state_dict_hooks(sharded: ShardedModel) -> None:
    """Install hooks by which `state_dict` and `load_state_dict` work with sharded parameters.

    They do so for replicated parameters that a codec has rounded, too. Where parameters have
    masters, loaded values are written to both. Values of replicated parameters, which are parts of
    a flat buffer, are given out with storages of their own.
    """
    owned: dict[nn.Module, _ModuleHooks] = {}
    in_buffers: dict[nn.Module, list[str]] = {}
    given: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
    for unit in sharded.units:
        for module, attribute, index, position in unit.owners:
            param_ref = param_ref_of(unit.buffers[index].params[position], what="state_dict()")
            if not _has_exact(param_ref) or param_ref.buffer.has_masters:
                owned.setdefault(module, _ModuleHooks(sharded)).param_refs[attribute] = param_ref
            if _has_exact(param_ref):
                in_buffers.setdefault(module, []).append(attribute)
    for module, attributes in in_buffers.items():
        handle = module.register_state_dict_post_hook(_OwnStorages(attributes, given))
        sharded.removers.append(handle.remove)
    if sharded.whole.world_size > 1 and sharded.units:
        # The first of ours: those below take what they have loaded out of the dict.
        handle = sharded.model.register_load_state_dict_pre_hook(_refuse_nothing)
        sharded.removers.append(handle.remove)
    for module, hooks in owned.items():
        handles = [
            module.register_load_state_dict_pre_hook(hooks.load_state_dict),
            module.register_load_state_dict_post_hook(hooks.after_load),
        ]
        if not all(map(_has_exact, hooks.param_refs.values())):
            handles += [
                module.register_state_dict_pre_hook(hooks.before_export),
                module.register_state_dict_post_hook(hooks),
            ]
        sharded.removers.extend(handle.remove for handle in handles)


def _refuse_nothing(
    module: nn.Module, state: dict, prefix: str, metadata: dict, strict: bool, *lists: list[str]
) -> None:
    """Add an error where this rank is given nothing, which would leave its shards as they are.

    Also if `load_state_dict` is not strict: the other ranks load their parts. But not inside
    `GatheredParameters`, where values of one rank are sent to the others.
    """
    sharded = require_sharded(module)
    if not state and not prefix and not sharded.gathered:
        lists[-1].append(
            f"rank {sharded.whole.rank} was given no values; full_state_dict() returns them on "
            "rank 0 alone, and every rank must load them: zero_engine.load_pretrained(model, "
            "file), or broadcast the dict first"
        )


# Without slots: torch sets an attribute of its own on hooks of state_dict.
@define(eq=False, slots=False)
class _OwnStorages(Bound):
    """Gives values in a state dict storages of their own, over the same memory.

    `torch.save` writes the whole storage of a tensor: a layer's weights would be as large a file as
    the flat buffer of their unit. Tied values share one storage, so that they stay tied in a file.
    """

    attributes: list[str]
    # Address -> a value that is still alive; shared by the hooks of all modules.
    given: WeakValueDictionary[int, Tensor]

    def __call__(self, module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
        """Change the values of these parameters."""
        for attribute in self.attributes:
            given: Any = state.get(prefix + attribute)
            value = local_of(given)
            # Hooks of other code may have replaced the value by something else.
            if type(value) is Tensor and value.numel() and not value.is_meta:
                self._narrow(value)
                # torch saves a DTensor only if its wrapper was made at offset 0.
                state[prefix + attribute] = like(given, value)

    def _narrow(self, value: Tensor) -> None:
        storage, num_bytes = value.untyped_storage(), value.numel() * value.itemsize
        if storage.nbytes() == num_bytes:
            return
        start = value.storage_offset() * value.itemsize
        tied = self.given.get(value.data_ptr())
        # A slice of a storage is the same memory, and keeps all of it alive.
        part: Any = storage[start : start + num_bytes] if tied is None else tied.untyped_storage()
        with torch.inference_mode(False):
            own = torch.empty(0, dtype=value.dtype, device=value.device)
            # `data` leaves the version counter, which the parameter shares, as it is; `set_` of the
            # value itself would count, if only for a moment, and a save beside it would see that.
            value.data = own.set_(part, 0, value.size(), value.stride())
        self.given[value.data_ptr()] = value


def _has_exact(param_ref: ParamRef) -> bool:
    """Return whether its unit's parameters are replicated, and not rounded by a codec."""
    return param_ref.unit.placement is Placement.REPLICATED and param_ref.unit.codec is None


# Without slots: torch sets an attribute of its own on hooks of state_dict.
@define(eq=False, slots=False)
class _ModuleHooks(Bound):
    """State dict hooks of a module that owns some parameters."""

    sharded: ShardedModel
    # Attribute of the module -> parameter.
    param_refs: dict[str, ParamRef] = field(factory=dict, init=False)
    # Attribute -> exact values, where slots have rounded ones.
    _exact: dict[str, Tensor] = field(factory=dict, init=False)
    # Attributes for which the state dict gets names only.
    _named: set[str] = field(factory=set, init=False)
    _loaded: set[str] = field(factory=set, init=False)

    def before_export(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Unshard what the module owns, or let the state dict have its names."""
        sharded, call = self.sharded, checkpoint_call()
        is_asked = call is not None and call["info"].full_state_dict
        if is_asked:
            sharded.refuse_own_ranks("get_state_dict()")
        gathers = sharded.state_dict == "gather" or is_asked
        if gathers and sharded.exported is None:
            sharded.follow_shard_writes()
        named = [attribute for attribute in self.param_refs if not self._has_values(attribute)]
        if named and call is not None and not gathers:
            remedy = self._remedy(prefix + named[0])
            raise StateError(f"get_state_dict() of torch.distributed.checkpoint: {remedy}")
        if len(named) < len(self.param_refs) and sharded.is_shard_written:
            raise StateError(
                "state_dict() after the optimizer's parameters were written outside of its "
                f"step: other ranks' parts are not here yet (rank {sharded.whole.rank}); call "
                "the model, or zero_engine.full_state_dict(model), on every rank first"
            )
        if gathers and named and sharded.exported is None:
            self._gather()
            named = []
        self._named = set(named)
        if not keep_vars:
            export(module, {each: partial(self._value, each, prefix) for each in named})

    def _has_values(self, attribute: str) -> bool:
        param_ref = self.param_refs[attribute]
        is_exact = param_ref.unit.state is ShardState.UNSHARDED and param_ref.unit.codec is None
        return self.sharded.exported is None and (is_exact or param_ref.is_gathered)

    def _value(self, attribute: str, prefix: str) -> Tensor:
        param_ref = self.param_refs[attribute]
        param = outer_of(param_ref.buffer.params[param_ref.position])
        value = (self.sharded.exported or {}).get(id(param))
        return NameOnly.of(param, self._remedy(prefix + attribute)) if value is None else value

    def _remedy(self, name: str) -> str:
        if self.sharded.exported is not None:
            return (
                f"the values of parameter {name!r} are not here while this state dict is made. "
                "What a state_dict hook of the model derives from them, compute from the result of "
                "zero_engine.full_state_dict(model), or train at stage 2 or lower"
            )
        return in_lines(
            f"parameter {name!r} is sharded over {self.sharded.group.world_size} ranks, and there "
            "is no more than its name, shape and dtype here",
            "call zero_engine.full_state_dict(model) on every rank: rank 0 receives the weights; "
            "save_pretrained() and the like take them as state_dict=...",
            "let what takes none save inside `with zero_engine.unsharded(model):`",
            "with torch.distributed.checkpoint, use StateDictOptions(full_state_dict=True)",
            "or set ZeroConfig(state_dict='gather') if every rank calls state_dict()",
            "an average of the weights is zero_engine.ShardedAverage(model, decay=...)",
        )

    def _gather(self) -> None:
        """Unshard what the module owns; gather exact values where a codec rounds. Collective."""
        sharded = self.sharded
        sharded.require("state_dict()", StateKind.PARAMS)
        # Finished, so that weights and optimizer state are of one step.
        if not sharded.open_contexts:
            sharded.finish_update()
        units = dict.fromkeys(param_ref.unit for param_ref in self.param_refs.values())
        for unit in units:
            unit.unshard(sharded.schedule.pool)
        rounded = [buffer for unit in units if unit.codec is not None for buffer in unit.buffers]
        values = {buffer: launch_buffer(buffer)() for buffer in rounded}
        for attribute, param_ref in self.param_refs.items():
            if param_ref.buffer in values:
                self._exact[attribute] = values[param_ref.buffer][param_ref.position]

    def __call__(self, module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
        """Give the state dict memory of its own, and reshard."""
        end_export(module)
        call = checkpoint_call()
        goes_to_host = call is not None and call["info"].cpu_offload
        given = {a: param_ref for a, param_ref in self.param_refs.items() if a not in self._named}
        for attribute, param_ref in given.items():
            name = prefix + attribute
            exact = self._exact.pop(attribute, None)
            # Hooks of modules inside may have resharded the unit.
            if exact is None and not param_ref.is_gathered:
                param_ref.unit.unshard(self.sharded.schedule.pool)
            if name in state:
                value = state[name].detach() if exact is None else exact
                state[name] = value.to("cpu" if goes_to_host else value.device, copy=True)
        for unit in dict.fromkeys(param_ref.unit for param_ref in given.values()):
            if not self.sharded.is_in_use(unit):
                unit.reshard()

    @collective
    def load_state_dict(  # noqa: PLR0917 (torch passes them by position)
        self,
        module: nn.Module,
        state: dict,
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Write this rank's part of each value given, and leave torch nothing to copy.

        Inside `GatheredParameters` torch copies to the whole values, perhaps on one rank alone.
        """
        gathered = self.sharded.gathered
        given = [
            param_ref
            for attribute, param_ref in self.param_refs.items()
            if prefix + attribute in state
        ]
        is_for_writing = bool(gathered) and "unsharded()" not in self.sharded.open_contexts
        if is_for_writing and all(param_ref in gathered for param_ref in given):
            return
        self.sharded.require("load_state_dict()", no=(ModelPhase.GATHERED,))
        self.sharded.compare_launches("load_state_dict()", at_once=True)
        self.sharded.begin_write()
        for attribute, param_ref in self.param_refs.items():
            name, value = prefix + attribute, state.pop(prefix + attribute, None)
            expected = outer_of(param_ref.param).shape
            if value is None:
                continue
            if isinstance(value, NameOnly):
                # Its own name means its own values: torch copies a parameter to itself.
                if value.param is not outer_of(param_ref.buffer.params[param_ref.position]):
                    what = "expected values, got a name"
                    errors.append(f"parameter {name!r}: {what}: {value.remedy}")
            elif not isinstance(value, Tensor) or value.shape != expected:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                errors.append(f"parameter {name!r}: expected shape {tuple(expected)}, got {got}")
            elif value.is_meta or value.layout is not torch.strided:
                got = "meta tensor" if value.is_meta else f"layout {value.layout}"
                errors.append(
                    f"parameter {name!r}: expected a dense tensor with values, got {got}; convert "
                    "or load it first"
                )
            elif is_dtensor(outer_of(param_ref.param)) and not is_dtensor(value):
                errors.append(
                    f"parameter {name!r} is a DTensor: expected one, got a {type(value).__name__}; "
                    "distribute_tensor() makes one of a whole value, or call "
                    "zero_engine.set_full_param(parameter, value) for each"
                )
            else:
                param_ref.buffer.fill(
                    param_ref.position, part_of_whole(param_ref.param, plain_of(value))
                )
            self._loaded.add(name)
        self.sharded.end_write()

    def after_load(self, module: nn.Module, incompatible: Any) -> None:
        """Remove keys that were written to shards from the missing ones."""
        missing = incompatible.missing_keys
        missing[:] = [key for key in missing if key not in self._loaded]
        self._loaded.clear()


@collective
def full_optimizer_state_dict(model: nn.Module) -> dict[str, Any]:
    """The optimizer's whole `state_dict`, on rank 0, in host memory. Collective; between steps.

    In torch's format, numbered in the order of param groups: the plain optimizer over the plain
    model loads it. Where parameters have masters (`Precision(params=...)`), these are beside it
    under "masters", by the same numbers. A delayed update is finished first, as in
    `full_state_dict`. The other ranks need memory for one whole entry of one parameter at a time
    and, if state is offloaded, for one unit's shard of it.

    Returns:
        The state dict on rank 0, an empty dict on other ranks. That of a `ChainedOptimizer` has a
        list of state dicts under "optimizers".

    Raises:
        StateError: Not sharded, or without an optimizer; a forward is running; or an entry is laid
            out so that no whole of it is known.
        PartitionError: A group that was added has parameters that the model lacks.
        zero_comm.CommError: A rank did not take part in time.
    """
    sharded = require_sharded(model)
    optimizer = _usable(sharded, "full_optimizer_state_dict()")
    sharded.refuse_own_ranks("full_optimizer_state_dict()")
    sharded.finish_update()
    is_first = sharded.whole.rank == 0
    states = [_gather(sharded, member, is_kept=is_first) for member in members_of(optimizer)]
    if not is_first:
        return {}
    return {"optimizers": states} if isinstance(optimizer, ChainedOptimizer) else states[0]


@collective
def load_full_optimizer_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Make a whole optimizer's `state_dict` that of a sharded optimizer. Collective; between steps.

    At any stage, residence, cut and world size, also from a plain optimizer over the plain model.
    Masters, where there are any in it, become the values of their parameters: load weights before.
    How a step is computed (`fused`, `foreach`, ...) stays. Each rank keeps a copy of its part, in
    host memory, until all of it is there.

    Args:
        model: The very module that was sharded.
        state_dict: What `full_optimizer_state_dict`, or torch's `state_dict()`, gave. Rank 0's
            counts; the others may pass {}.

    Raises:
        LoadError: On every rank: names what is missing, unexpected or does not fit; nothing was
            written.
        StateError, PartitionError: As for `full_optimizer_state_dict`.
        zero_comm.CommError: A rank did not take part in time.
    """
    sharded = require_sharded(model)
    what, group = "load_full_optimizer_state_dict()", sharded.routes.all_ranks
    optimizer = _usable(sharded, what)
    sharded.refuse_own_ranks(what)
    problem, description, tensors = "", None, list[Tensor]()
    try:
        description = describe(dict(state_dict), tensors) if group.rank == 0 else None
    except (StateError, TypeError, ValueError) as error:
        problem = str(error)
    problem, description = all_gather_json(
        [problem, description], group=group, timeout_s=_TIMEOUT_S
    )[0]
    if problem:
        raise LoadError(f"{what}: {problem} (on rank 0; seen on rank {group.rank})")
    sources = tensors if group.rank == 0 else repeat(None)
    readers = [
        _Received(torch.Size(shape), dtype, source, group)
        for (dtype, shape), source in zip(described_tensors(description), sources, strict=False)
    ]
    nest = rebuild(description, iter(readers))
    members = members_of(optimizer)
    parts = nest.get("optimizers") if isinstance(optimizer, ChainedOptimizer) else [nest]
    if not isinstance(parts, list) or len(parts) != len(members):
        raise LoadError(f"{what}: expected the states of {len(members)} chained optimizers")
    _load(sharded, dict(zip(members, parts, strict=True)), what)


def _usable(sharded: ShardedModel, what: str) -> torch.optim.Optimizer:
    """The optimizer, if its state can be read or replaced now."""
    if sharded.optimizer is None:
        raise StateError(
            f"{what}: the model was sharded without an optimizer (rank {sharded.whole.rank})"
        )
    sharded.require(what, StateKind.OPTIM, StateKind.MASTERS, no=(ModelPhase.FORWARD,))
    check_params_of(sharded.optimizer, names_by_owner(sharded), sharded.model)
    return sharded.optimizer


def _gather(
    sharded: ShardedModel, member: torch.optim.Optimizer, *, is_kept: bool
) -> dict[str, Any]:
    """The whole state of one optimizer in host memory, an entry at a time. Collective."""
    mine = chain.from_iterable(group["params"] for group in member.param_groups)
    numbers = {id(param): number for number, param in enumerate(mine)}
    is_sharded, local = sharded.shards_state, LocalState(sharded)
    state: dict[int, dict[str, Any]] = {}
    masters: dict[int, Tensor] = {}
    if not is_sharded and is_kept:
        state = {
            numbers[id(param)]: map_tensors(flat_entries(of), partial(_whole_on_host, param))
            for param, of in member.state.items()
            if isinstance(param, Tensor)
        }
    param_refs = [p for p in sharded.param_refs if is_sharded and id(owner_of(p)) in numbers]
    for buffer in dict.fromkeys(param_ref.buffer for param_ref in param_refs):
        buffer.follow_writes()
    entries = plan_states(sharded, local.describe(param_refs), timeout_s=_TIMEOUT_S)
    for buffer, chosen in groupby(param_refs, key=lambda param_ref: param_ref.buffer):
        mine = list(chosen)
        for param_ref, values in local.read(mine).items():
            number = numbers[id(owner_of(param_ref))]
            for key, entry in entries[param_ref].items():
                whole = launch_entry(param_ref, key, entry, values)()
                if is_kept:
                    to_host = partial(_whole_on_host, param_ref.param)
                    state.setdefault(number, {})[key] = map_tensors(whole, to_host)
        if buffer.main_shard.dtype != buffer.plan.dtype:
            all_values = launch_trained_buffer(buffer)()
            for param_ref in mine if is_kept else ():
                master = _whole_on_host(param_ref.param, all_values[param_ref.position])
                masters[numbers[id(owner_of(param_ref))]] = master
    whole: dict[Any, Any] = {n: nested_entries(of_param) for n, of_param in sorted(state.items())}
    whole |= map_tensors(shared_state(member), _on_host) if is_kept else {}
    groups = [
        {
            **{k: map_tensors(v, _on_host) for k, v in group.items() if k != "params"},
            "params": [numbers[id(param)] for param in group["params"]],
        }
        for group in member.param_groups
    ]
    beside = {"masters": dict(sorted(masters.items()))} if masters else {}
    extra = map_tensors(extra_entries(member), _on_host) if is_kept else {}
    return {"state": whole, "param_groups": groups, **beside, **extra}


def _whole_on_host(param: Tensor, value: Tensor) -> Tensor:
    """Return a host copy, whole if the value is of a DTensor's part. Collective over its mesh."""
    is_part = value.shape == local_of(outer_of(param)).shape
    return _on_host(whole_over_mesh(param, value) if is_part else value)


def _on_host(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


@final
@define(eq=False)
class _Received(AbstractRangeReader):
    """A tensor of rank 0's, or this rank's own, of which it keeps what it is going to read."""

    shape: torch.Size
    dtype: torch.dtype
    _source: Tensor | None
    # None: every rank has the tensor.
    _group: Group | None
    _kept: Tensor = field(factory=lambda: torch.empty(0, device="cpu"), init=False)
    _start: int = field(default=0, init=False)

    def receive(self, span: Span | None = None) -> Tensor:
        """Keep these elements; all when None. Collective."""
        is_whole, span = span is None, span or Span(0, self.shape.numel())
        if self._group is None:
            assert self._source is not None, "every rank has it"
            flat = self._source.detach().reshape(-1)
        else:
            flat = torch.empty(self.shape.numel(), dtype=self.dtype, device=self._group.device)
            if self._source is not None:
                flat.copy_(self._source.detach().reshape(-1))
            if flat.numel():
                broadcast_flat(flat.view(torch.uint8), src=0, group=self._group).wait()
        self._kept, self._start = flat[span.as_slice()].to("cpu", copy=True), span.start
        return self._kept.view(self.shape) if is_whole else self._kept

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened tensor, of those that were received."""
        return self._kept[start - self._start : stop - self._start]


def _load(
    sharded: ShardedModel, given: Mapping[torch.optim.Optimizer, Mapping[str, Any]], what: str
) -> None:
    """Make these the states of these optimizers: all of it, or nothing. Collective."""
    planned = _plan(sharded, given, what)
    group = sharded.routes.all_ranks
    by_rank = all_gather_json(list(planned.problems), group=group, timeout_s=_TIMEOUT_S)
    if problems := list(dict.fromkeys(chain.from_iterable(by_rank))):
        raise LoadError(
            f"{what}: cannot be loaded, and nothing was written: {shown_all(problems)} (seen on "
            f"rank {group.rank})"
        )
    needed = {id(reader): span for reader, span in planned.spans()}
    source = planned.source
    entries = chain.from_iterable(state.values() for state in (source.states or {}).values())
    for reader in {id(r): r for r in (*entries, *source.params.values())}.values():
        if isinstance(reader, _Received):
            reader.receive(needed.get(id(reader), Span(0, 0)))
    planned.apply()


def _plan(
    sharded: ShardedModel, given: Mapping[torch.optim.Optimizer, Mapping[str, Any]], what: str
) -> StateLoad:
    """Plan the load, and collect all problems. Collective: tensors outside entries are received."""
    mine = iter(param_groups_of(sharded))
    groups: list[dict[str, Any]] = []
    states: dict[str, dict[str, Any]] = {}
    loaded: set[str] = set()
    shared: list[dict[Any, Any]] = []
    extra: list[dict[str, Any]] = []
    for member in members_of(sharded.optimizer):
        own = [next(mine) for _ in member.param_groups]
        if member not in given:
            groups += own
            shared.append({})
            extra.append({})
            continue
        part = given[member]
        if not {"state", "param_groups"} <= part.keys():
            raise LoadError(
                f"{what}: expected what the state_dict() of {type(member).__name__} gives, with "
                f"'state' and 'param_groups', got {sorted(map(str, part))}; "
                "full_optimizer_state_dict(model) gives it on rank 0"
            )
        theirs = [map_tensors(g, _Received.receive, _Received) for g in part["param_groups"]]
        sizes = [[len(group["params"]) for group in of] for of in (own, theirs)]
        if sizes[0] != sizes[1]:
            raise LoadError(
                f"{what}: expected param groups of {sizes[0]} parameters, as this "
                f"{type(member).__name__} has, got {sizes[1]}"
            )
        known = list(chain.from_iterable(group["params"] for group in own))
        numbers = chain.from_iterable(group["params"] for group in theirs)
        by_name = {_plain_name(name): name for name in known}
        names = {
            number: by_name.get(number, number) if isinstance(number, str) else name
            for name, number in zip(known, numbers, strict=True)
        }
        loaded.update(known)
        groups += [{**g, "params": [names[number] for number in g["params"]]} for g in theirs]
        is_known = {key: isinstance(key, int) or key in names for key in part["state"]}
        shared.append({key: v for key, v in part["state"].items() if not is_known[key]})
        known_keys = {"state", "param_groups", "masters"}
        extra.append({key: value for key, value in part.items() if key not in known_keys})
        for number, state in part["state"].items():
            if not is_known[number]:
                continue
            states[names.get(number, f"parameter {number}")] = {
                key: v if isinstance(v, _Received) else map_tensors(v, _Received.receive, _Received)
                for key, v in flat_entries(state).items()
            }
        for number, master in part.get("masters", {}).items():
            states.setdefault(names.get(number, f"parameter {number}"), {})[MASTER] = master
    masters = {name: state.pop(MASTER) for name, state in states.items() if MASTER in state}
    source = StateSource(
        params=masters,
        buffers={},
        may_lack=None,
        states=states,
        param_groups=groups,
        shared=[map_tensors(of, _Received.receive, _Received) for of in shared],
        extra=[map_tensors(of, _Received.receive, _Received) for of in extra],
        where=what,
    )
    planned = plan_load(sharded, source, is_strict=True)
    mine = {ref: state for ref, state in planned.states.items() if ref.name in loaded}
    return evolve(planned, states=mine)


def install_state_dict_hooks_of(optimizer: torch.optim.Optimizer, sharded: ShardedModel) -> None:
    """Let `state_dict()` and `load_state_dict()` mean the whole, or say what to call instead."""
    for member in members_of(optimizer):
        if sharded.shards_state:
            watch_state(member)
            sharded.removers.append(lambda member=member: leave_state(member))
        hooks, hooked = _StateDictHooks(sharded), with_state_dict_hooks(member)
        handles = (
            hooked.register_state_dict_pre_hook(hooks.before_export),
            hooked.register_state_dict_post_hook(hooks.state_dict),
            hooked.register_load_state_dict_pre_hook(hooks.load_state_dict),
            hooked.register_load_state_dict_post_hook(hooks.after_load),
        )
        sharded.removers.extend(handle.remove for handle in handles)


@define(eq=False)
class _StateDictHooks(Bound):
    """State dict hooks of one optimizer. This rank's part must not pass for the whole state."""

    sharded: ShardedModel
    # The optimizer's state, while torch loads param groups.
    _state: Any = field(default=None, init=False)

    def before_export(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse, where not every rank is known to call it."""
        call = checkpoint_call()
        theirs = "get_state_dict() of torch.distributed.checkpoint, without full_state_dict=True"
        what = "optimizer.state_dict()" if call is None else theirs
        is_asked = call is not None and call["info"].full_state_dict
        self._check(what, "full_optimizer_state_dict(model)", may_gather=is_asked)

    @collective
    def state_dict(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of all ranks in place of this rank's. Collective."""
        whole, call = _gather(self.sharded, optimizer, is_kept=True), checkpoint_call()
        if call is None:
            return whole
        # torch.distributed.checkpoint collects optimizers' states here, by names that it finds by
        # the model's parameters; what this optimizer has are shards of them. So nothing is left.
        given, known = call["optim_state_dict"], names_by_owner(self.sharded)
        owners = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        names = [_plain_name(known[id(owner)]) for owner in owners]
        for number, entries in whole["state"].items():
            given["state"][names[number]] = entries
        for number, master in whole.get("masters", {}).items():
            given["state"].setdefault(names[number], {})[MASTER] = master
        for group in whole["param_groups"]:
            group["params"] = [names[number] for number in group["params"]]
            given["param_groups"].append(group)
        return {"state": {}, "param_groups": []}

    @collective
    def load_state_dict(
        self, optimizer: torch.optim.Optimizer, given: dict[str, Any]
    ) -> dict[str, Any]:
        """Keep this rank's part, and leave torch nothing but the param groups as they are then."""
        what = "optimizer.load_state_dict()"
        self._check(what, "load_full_optimizer_state_dict(model, state_dict)")
        _load(self.sharded, {optimizer: map_tensors(given, _own)}, what)
        self._state, numbers = optimizer.state, count()
        groups = [
            {**group, "params": [next(numbers) for _ in group["params"]]}
            for group in optimizer.param_groups
        ]
        return {"state": {}, "param_groups": groups}

    def after_load(self, optimizer: torch.optim.Optimizer) -> None:
        """Put our state back, which torch has replaced by an empty one."""
        optimizer.state, self._state = self._state, None

    def _check(self, what: str, remedy: str, *, may_gather: bool = False) -> None:
        routes = self.sharded.routes
        num_shards = routes.shards.world_size if self.sharded.shards_state else 1
        num_ranks = routes.num_parts * num_shards
        gathers = self.sharded.state_dict == "gather" or may_gather
        if num_ranks > 1 and not gathers:
            raise StateError(
                f"{what}: the optimizer's state is sharded over {num_ranks} ranks, and this is "
                f"rank {routes.all_ranks.rank}, which has its part alone. Call "
                f"zero_engine.{remedy} on every rank (the whole, in torch's format, is rank 0's), "
                "zero_engine.save() and load() for checkpoints, or set "
                f"ZeroConfig(state_dict='gather') if every rank calls {what}."
            )
        _usable(self.sharded, what)


def _plain_name(name: str) -> str:
    """Return the name that torch.distributed.checkpoint uses, also inside a compiled module."""
    return name.replace("_orig_mod.", "")


def _own(value: Tensor) -> Any:
    return _Received(value.shape, value.dtype, plain_of(value), None)
