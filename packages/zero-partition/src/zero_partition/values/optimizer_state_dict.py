"""An optimizer's whole `state_dict`, as torch writes it: out of a partitioned model, and in."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, count, groupby, repeat
from typing import Any, Final, final

import torch
from attrs import define, evolve, field
from torch import Tensor, nn
from zero_comm import Group, all_gather_json, broadcast_flat, collective

from zero_partition.chained import ChainedOptimizer, members_of
from zero_partition.errors import LoadError, StateError
from zero_partition.memory.seams import MASTER, AbstractRangeReader
from zero_partition.nested import describe, map_tensors, rebuild, tensors_said
from zero_partition.optimizer.shards import leave_state, watch_state
from zero_partition.plan.layout import Span
from zero_partition.run.hooks import require_sharded
from zero_partition.run.sharded_model import ModelState, ShardedModel, launch_trained_buffer
from zero_partition.stand_in import Bound, StateKind
from zero_partition.torch_private import checkpoint_call

from .load import EntryPart, StateLoad, StateSource, names_by_owner, param_groups_of, plan_load
from .runs import (
    ask_states,
    launch_entry,
    owner_of,
    plan_state,
    states_of,
)
from .state_dict import WITHOUT_FULL

_TIMEOUT_S: Final = 60.0

# NOTE(masters): torch's format has no place for the values that an optimizer updates beside rounded
# parameters, and weights alone would lose what was rounded away. They lie beside "state", where
# torch's `load_state_dict()` does not look: a parameter may have a master, and no state.


@collective
def full_optimizer_state_dict(model: nn.Module) -> dict[str, Any]:
    """The optimizer's whole `state_dict`, on rank 0, in host memory. Collective; between steps.

    In torch's format, numbered in the order of param groups: the plain optimizer over the plain
    model loads it. Where parameters have masters (`Precision(params=...)`), these are beside it
    under "masters", by the same numbers. A delayed update comes in first, as in `full_state_dict`.
    One entry of one parameter is whole at a time on the other ranks, and one unit's shard of state
    in memory that rests elsewhere.

    Returns:
        The state dict on rank 0, an empty dict elsewhere. Of a `ChainedOptimizer`, what that gives.

    Raises:
        StateError: Not sharded, or without an optimizer; a forward is running; or an entry is laid
            out so that no whole of it is known.
        zero_comm.CommError: A rank did not take part in time.
    """
    sharded = require_sharded(model)
    optimizer = _usable(sharded, "full_optimizer_state_dict()")
    sharded.finish_update()  # so that weights and optimizer state are of one step
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
        StateError: As for `full_optimizer_state_dict`.
        zero_comm.CommError: A rank did not take part in time.
    """
    sharded = require_sharded(model)
    what, group = "load_full_optimizer_state_dict()", sharded.whole
    optimizer = _usable(sharded, what)
    problem, said, tensors = "", None, list[Tensor]()
    try:
        said = describe(dict(state_dict), tensors) if group.rank == 0 else None
    except (StateError, TypeError, ValueError) as error:
        problem = str(error)
    problem, said = all_gather_json([problem, said], group=group, timeout_s=_TIMEOUT_S)[0]
    if problem:
        raise LoadError(f"{what}: {problem} (on rank 0; seen on rank {group.rank})")
    sources = tensors if group.rank == 0 else repeat(None)
    readers = [
        _Received(torch.Size(shape), dtype, source, group)
        for (dtype, shape), source in zip(tensors_said(said), sources, strict=False)
    ]
    nest = rebuild(said, iter(readers))
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
    sharded.require(what, StateKind.OPTIM, StateKind.MASTERS, no=(ModelState.FORWARD,))
    return sharded.optimizer


def _gather(
    sharded: ShardedModel, member: torch.optim.Optimizer, *, is_kept: bool
) -> dict[str, Any]:
    """The whole state of one optimizer in host memory, an entry at a time. Collective."""
    mine = chain.from_iterable(group["params"] for group in member.param_groups)
    numbers = {id(param): number for number, param in enumerate(mine)}
    state: dict[int, dict[str, Any]] = {}
    masters: dict[int, Tensor] = {}
    is_sharded = sharded.shards_state
    if not is_sharded and is_kept:
        state = {numbers[id(p)]: map_tensors(dict(of), _on_host) for p, of in member.state.items()}
    places = [p for p in sharded.places if is_sharded and id(owner_of(p)) in numbers]
    for buffer in dict.fromkeys(place.buffer for place in places):
        buffer.follow_writes()
    said = []
    if is_sharded:
        own = states_of(sharded, places)
        said = ask_states(own, group=sharded.group, timeout_s=_TIMEOUT_S)
    planned = {place: plan_state(place, of) for place, of in zip(places, said, strict=True)}
    for buffer, chosen in groupby(places, key=lambda place: place.buffer):
        mine = list(chosen)
        for place, values in zip(mine, states_of(sharded, mine, is_read=True), strict=True):
            number, tag = numbers[id(owner_of(place))], sharded.access_tag
            for key, entry in planned[place].items():
                whole = launch_entry(entry, values, key, group=sharded.group, tag=tag)()
                if is_kept:
                    state.setdefault(number, {})[key] = map_tensors(whole, _on_host)
        if buffer.training.dtype != buffer.plan.dtype:
            all_values = launch_trained_buffer(buffer)()
            for place in mine if is_kept else ():
                masters[numbers[id(owner_of(place))]] = _on_host(all_values[place.position])
    groups = [
        {
            **{k: map_tensors(v, _on_host) for k, v in group.items() if k != "params"},
            "params": [numbers[id(param)] for param in group["params"]],
        }
        for group in member.param_groups
    ]
    beside = {"masters": dict(sorted(masters.items()))} if masters else {}
    return {"state": dict(sorted(state.items())), "param_groups": groups, **beside}


def _on_host(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


@final
@define(eq=False)
class _Received(AbstractRangeReader):
    """A tensor of rank 0's, or this rank's own, of which it keeps what it is going to read."""

    _shape: torch.Size
    _dtype: torch.dtype
    _source: Tensor | None
    _group: Group | None  # None: every rank has it
    _kept: Tensor = field(factory=lambda: torch.empty(0), init=False)
    _start: int = field(default=0, init=False)

    @property
    def shape(self) -> torch.Size:
        """See `AbstractRangeReader.shape`."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """See `AbstractRangeReader.dtype`."""
        return self._dtype

    def receive(self, span: Span | None = None) -> Tensor:
        """Keep these elements; all when None. Collective."""
        is_whole, span = span is None, span or Span(0, self._shape.numel())
        if self._group is None:
            assert self._source is not None, "every rank has it"
            flat = self._source.detach().reshape(-1)
        else:
            flat = torch.empty(self._shape.numel(), dtype=self._dtype, device=self._group.device)
            if self._source is not None:
                flat.copy_(self._source.detach().reshape(-1))
            if flat.numel():
                broadcast_flat(flat.view(torch.uint8), src=0, group=self._group).wait()
        self._kept, self._start = flat[span.as_slice()].to("cpu", copy=True), span.start
        return self._kept.view(self._shape) if is_whole else self._kept

    def read(self, start: int, stop: int) -> Tensor:
        """See `AbstractRangeReader.read`; of what was received."""
        return self._kept[start - self._start : stop - self._start]


def _load(
    sharded: ShardedModel, given: Mapping[torch.optim.Optimizer, Mapping[str, Any]], what: str
) -> None:
    """Make these the states of these optimizers: all of it, or nothing. Collective."""
    planned = _plan(sharded, given, what)
    said = all_gather_json(list(planned.problems), group=sharded.whole, timeout_s=_TIMEOUT_S)
    if problems := list(dict.fromkeys(chain.from_iterable(said))):
        raise LoadError(
            f"{what}: cannot be loaded, and nothing was written: {'; '.join(problems)} (seen on "
            f"rank {sharded.whole.rank})"
        )
    needed: dict[int, Span] = {}
    for target in planned.states:
        parts = [part for part in target.entries.values() if isinstance(part, EntryPart)]
        needed |= {id(part.reader): part.span for part in parts}
    for target in planned.values:
        if target.found:  # a master
            needed[id(target.reader)] = target.kept
    source = planned.source
    entries = chain.from_iterable(state.values() for state in (source.states or {}).values())
    for reader in {id(r): r for r in (*entries, *source.params.values())}.values():
        if isinstance(reader, _Received):
            reader.receive(needed.get(id(reader), Span(0, 0)))
    planned.apply()


def _plan(
    sharded: ShardedModel, given: Mapping[torch.optim.Optimizer, Mapping[str, Any]], what: str
) -> StateLoad:
    """Find where it goes, and all that speaks against it. Collective for what is no entry."""
    mine = iter(param_groups_of(sharded))
    groups: list[dict[str, Any]] = []
    states: dict[str, dict[str, Any]] = {}
    loaded: set[str] = set()
    for member in members_of(sharded.optimizer):
        own = [next(mine) for _ in member.param_groups]
        if member not in given:
            groups += own
            continue
        part = given[member]
        if not {"state", "param_groups"} <= part.keys():
            raise LoadError(
                f"{what}: expected what the state_dict() of a {type(member).__name__} gives, with "
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
        for number, state in part["state"].items():
            states[names.get(number, f"parameter {number}")] = {
                key: v if isinstance(v, _Received) else map_tensors(v, _Received.receive, _Received)
                for key, v in state.items()
            }
        for number, master in part.get("masters", {}).items():
            states.setdefault(names.get(number, f"parameter {number}"), {})[MASTER] = master
    masters = {name: state.pop(MASTER) for name, state in states.items() if MASTER in state}
    source = StateSource(
        params=masters,
        buffers={},
        ties={},
        may_lack=None,
        states=states,
        param_groups=groups,
        where=what,
    )
    planned = plan_load(sharded, source, is_strict=True)
    return evolve(
        planned, states=[target for target in planned.states if target.place.name in loaded]
    )


def install_state_dict_hooks_of(optimizer: torch.optim.Optimizer, sharded: ShardedModel) -> None:
    """Let `state_dict()` and `load_state_dict()` mean the whole, or say what to call instead."""
    for member in members_of(optimizer):
        watch_state(member)
        hooks = _StateDictHooks(sharded)
        handles = (
            member.register_state_dict_pre_hook(hooks.before_export),
            member.register_state_dict_post_hook(hooks.after_export),
            member.register_load_state_dict_pre_hook(hooks.before_load),
            member.register_load_state_dict_post_hook(hooks.after_load),
        )
        sharded.removers += [handle.remove for handle in handles]
        sharded.removers.append(lambda member=member: leave_state(member))


@define(eq=False)
class _StateDictHooks(Bound):
    """Of one optimizer. What this rank has must not pass for all there is."""

    sharded: ShardedModel
    _state: Any = field(default=None, init=False)  # while torch loads param groups

    def before_export(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse, where not every rank is known to call it."""
        call = checkpoint_call()
        what = "optimizer.state_dict()" if call is None else WITHOUT_FULL
        is_asked = call is not None and call["info"].full_state_dict
        self._check(what, "full_optimizer_state_dict(model)", may_gather=is_asked)

    def after_export(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        """All ranks' in place of this one's."""
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

    def before_load(
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
        """Torch has put an empty state in the place of ours."""
        optimizer.state, self._state = self._state, None

    def _check(self, what: str, remedy: str, *, may_gather: bool = False) -> None:
        group = self.sharded.group
        if group.world_size > 1 and not (self.sharded.gathers_state_dict or may_gather):
            raise StateError(
                f"{what}: the optimizer's state is sharded over {group.world_size} ranks, and this "
                f"is rank {group.rank}, which has its part alone. Call zero_engine.{remedy} on "
                "every rank (the whole, in torch's format, is rank 0's), zero_engine.save() and "
                "load() for checkpoints, or set ZeroConfig(state_dict='gather') if every rank "
                f"calls {what}."
            )
        _usable(self.sharded, what)


def _plain_name(name: str) -> str:
    """What torch.distributed.checkpoint calls it, where a module in it is compiled."""
    return name.replace("_orig_mod.", "")


def _own(value: Tensor) -> Any:
    return _Received(value.shape, value.dtype, value, None)
