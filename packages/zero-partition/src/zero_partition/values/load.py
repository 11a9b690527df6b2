"""Values and optimizer state from elsewhere into a partitioned model: all of it, or none."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from zero_comm import Group

from zero_partition.chained import members_of, options_of
from zero_partition.errors import LoadError, PartitionError, StateError
from zero_partition.init.context import guard_module
from zero_partition.init.early_shard import find_early, plan_early
from zero_partition.init.materialize import allocate_blank, allocate_blank_buffer, plain_on_meta
from zero_partition.init.units import check_parameter
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.memory.seams import MASTER, AbstractRangeReader, OptimizerOffload
from zero_partition.nested import map_tensors, rebuild
from zero_partition.optimizer.entries import (
    keeps_of,
    keys_for_whole,
    part_in_entry,
    part_of_entry,
    spans_said,
)
from zero_partition.optimizer.needs import entries_after_step
from zero_partition.plan.cuts import Cut
from zero_partition.plan.layout import Span
from zero_partition.plan.stages import Placement
from zero_partition.run.sharded_model import ParamRef, ShardedModel, find_place

from .parts import own_masters_of

CHUNK_BYTES: Final = 8 * 2**20  # what is in flight between a reader and what it fills
_BATCH_BYTES: Final = 16 * 2**20  # written together where state rests elsewhere
_ON_DEVICE_STEP: Final = ("capturable", "fused")  # options with which torch counts on the device

Readers = Mapping[int, AbstractRangeReader]  # by position in a buffer


def read_into(memory: Tensor, reader: AbstractRangeReader, span: Span) -> None:
    """Fill 1-D memory with elements of a reader, some at a time."""
    step = max(1, CHUNK_BYTES // reader.dtype.itemsize)
    for start in range(span.start, span.stop, step):
        stop = min(start + step, span.stop)
        memory[start - span.start : stop - span.start].copy_(reader.read(start, stop))


def fill_buffer(buffer: FlatBuffer, readers: Readers, offload: OptimizerOffload | None) -> None:
    """Read parameters to where they rest on this rank; masters are what is read, unrounded. Local.

    Beside what rests, there is one shard in memory where values rest elsewhere.
    """
    if offload is not None and buffer.targets and buffer.training.memory is not None:
        _fill_own_masters(buffer, readers, offload)
    if buffer.whole is not None:
        for position, reader in readers.items():
            span = buffer.plan.layout.spans[position]
            read_into(buffer.whole[span.as_slice()], reader, span.shifted(-span.start))
        if not buffer.has_masters and buffer.codec is None:
            return
        buffer.is_unrounded = buffer.codec is not None
    rest = buffer.training
    mine = [piece for piece in buffer.pieces if piece.index in readers]
    values = rest.memory
    if values is None and len(mine) == len(buffer.pieces):
        device = buffer.group.device
        values = torch.zeros(buffer.shard_numel, dtype=rest.dtype, device=device)
    elif values is None:
        values = rest.read()
    for piece in mine:
        read_into(values[piece.in_shard.as_slice()], readers[piece.index], piece.in_tensor)
    if rest.memory is None:
        rest.write(values)
        if offload is not None and buffer.targets and rest.dtype == buffer.plan.dtype:
            _fill_own_masters(buffer, readers, offload)
    if buffer.has_masters and (buffer.whole is None or buffer.codec is not None):
        buffer.resting.write(values)


def _fill_own_masters(buffer: FlatBuffer, readers: Readers, offload: OptimizerOffload) -> None:
    """Those that an optimizer offload keeps of its own accord, of parameters of 16 bits."""
    for piece in buffer.pieces:
        reader, target = readers.get(piece.index), buffer.targets[piece.index]
        if reader is None or not target.dtype.is_floating_point or target.dtype.itemsize >= 4:
            continue
        values = torch.empty(piece.in_tensor.numel, dtype=torch.float32)
        read_into(values, reader, piece.in_tensor)
        offload.write({target: {MASTER: values}}, replaces=False)


@frozen(eq=False)
class EntryPart:
    """This rank's part of one entry that is going to be read."""

    reader: AbstractRangeReader
    span: Span
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return self.span.numel * self.reader.dtype.itemsize

    def fill(self, memory: Tensor) -> Tensor:
        """Read it into a tensor of its shape."""
        read_into(memory.view(-1), self.reader, self.span)
        return memory


@define(eq=False)
class StateTarget:
    """One parameter's state in the optimizer: what it is going to be."""

    buffer: FlatBuffer
    position: int
    entries: dict[str, Any] = field(factory=dict)  # EntryPart, or a value; what is kept here
    num_entries: int = 0  # whole ones, that some rank keeps

    @property
    def name(self) -> str:
        """Of the parameter."""
        return self.buffer.plan.params[self.position].name

    def plan(
        self, state: Mapping[str, Any], placement: Placement, for_whole: Collection[str]
    ) -> None:
        """Take this rank's part of the whole entries; see `keys_for_whole`.

        Raises:
            PartitionError: A shape that the parameter's cut does not explain.
        """
        self.num_entries = len(state)
        param, piece = self.buffer.plan.params[self.position], self.buffer.piece_of(self.position)
        numel = param.shape.numel()
        span = Span(0, numel)
        if placement is Placement.SHARDED:
            span = Span(0, 0) if piece is None else piece.in_tensor
            if param.cut != Cut.FLAT and piece is None and numel:
                return  # another rank has all of it
        for key, value in state.items():
            if not isinstance(value, AbstractRangeReader):
                has_all = span.numel == numel
                self.entries[key] = value if has_all else part_of_entry(param, key, value, span)
            elif placement is Placement.SHARDED:
                part, shape = part_in_entry(param, key, value.shape, span, for_whole)
                self.entries[key] = EntryPart(value, part, shape)
            else:
                whole = Span(0, value.shape.numel())
                self.entries[key] = EntryPart(value, whole, tuple(value.shape))

    def add_own(self, entries: Mapping[str, Any]) -> None:
        """Take what this rank had of entries without a whole: nests, with readers for tensors."""

        def all_of(reader: AbstractRangeReader) -> EntryPart:
            return EntryPart(reader, Span(0, reader.shape.numel()), tuple(reader.shape))

        self.entries |= map_tensors(dict(entries), all_of, AbstractRangeReader)


def write_states(sharded: ShardedModel, targets: Sequence[StateTarget]) -> None:
    """Make these the states of their parameters. Local."""
    if sharded.residence.offload is not None:
        _write_elsewhere(sharded, targets)
        return
    is_sharded = sharded.placements.optim is Placement.SHARDED
    owner_of: dict[nn.Parameter, tuple[torch.optim.Optimizer, dict[str, Any]]] = {
        param: (member, group)
        for member in members_of(sharded.optimizer)
        for group in member.param_groups
        for param in group["params"]
    }
    for target in targets:
        buffer = target.buffer
        owner = (buffer.shard_params if is_sharded else buffer.params)[target.position]
        if owner not in owner_of:
            continue
        member, group = owner_of[owner]
        live = member.state.get(owner, {})
        state = {
            key: map_tensors(part, partial(_in_memory, key, owner, group, live), EntryPart)
            for key, part in target.entries.items()
        }
        if state:
            member.state[owner] = state
        elif owner in member.state:
            del member.state[owner]


def _in_memory(
    key: str,
    owner: nn.Parameter,
    group: Mapping[str, Any],
    live: Mapping[str, Any],
    part: EntryPart,
) -> Tensor:
    """As torch's optimizers place what they load; in the memory that is there, if it fits."""
    there = live.get(key)
    if isinstance(there, Tensor) and there.shape == part.shape and there.is_contiguous():
        return part.fill(there.detach())
    is_on_device = key != "step" or any(group.get(option) for option in _ON_DEVICE_STEP)
    device = owner.device if is_on_device else torch.device("cpu")
    return part.fill(torch.empty(part.shape, dtype=part.reader.dtype, device=device))


def _write_elsewhere(sharded: ShardedModel, targets: Sequence[StateTarget]) -> None:
    offload = sharded.residence.offload
    assert offload is not None, "asked before"
    begun: set[nn.Parameter] = set()
    for batch in _batches(targets):
        states: dict[bool, dict[nn.Parameter, dict[str, Any]]] = {True: {}, False: {}}
        for target, key in batch:
            if not target.buffer.targets:  # frozen, though in a param group
                continue
            param = target.buffer.targets[target.position]
            if not sharded.residence.is_stepped(param):
                continue
            is_first = param not in begun or param in states[True]
            begun.add(param)
            state = states[is_first].setdefault(param, {})
            if key is not None:
                state[key] = map_tensors(target.entries[key], _on_host, EntryPart)
        for replaces, chosen in states.items():
            if chosen and replaces:
                offload.mend()
            if chosen:
                offload.write(chosen, replaces=replaces)


def _on_host(part: EntryPart) -> Tensor:
    return part.fill(torch.empty(part.shape, dtype=part.reader.dtype))


def _batches(targets: Iterable[StateTarget]) -> Iterator[list[tuple[StateTarget, str | None]]]:
    """Entries that are written together; None stands for a state that is going to be empty."""
    batch: list[tuple[StateTarget, str | None]] = []
    num_bytes = 0
    for target in targets:
        for key in target.entries or (None,):
            part = None if key is None else target.entries[key]
            size = part.num_bytes if isinstance(part, EntryPart) else 0
            if batch and num_bytes + size > _BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
            batch.append((target, key))
            num_bytes += size
    if batch:
        yield batch


# ---- Where a rank keeps what is read from elsewhere: whole, a part, or nothing yet ----


NamedReaders: TypeAlias = Mapping[str, AbstractRangeReader]


@define(eq=False)
class Target:
    """One parameter or persistent buffer, and where this rank keeps which part of it."""

    names: tuple[str, ...]  # all it has in `state_dict`
    tensor: Tensor
    parts: list[tuple[Span, Tensor]] = field(factory=list)  # elements, and 1-D memory for them
    place: ParamRef | None = None  # in a model that is sharded: then it has no parts

    @property
    def is_meta(self) -> bool:
        """It has no memory yet."""
        return self.tensor.is_meta

    def given(self, readers: NamedReaders) -> list[str]:
        """Those of its names under which there is something to read."""
        return [name for name in self.names if name in readers]

    def find_parts(self, sharded: ShardedModel | None) -> None:
        """Find what this rank keeps, in a model that is `sharded`, or not. Nothing if on meta."""
        tensor, early, place = self.tensor, find_early(self.tensor), find_place(self.tensor)
        if place is not None and sharded is not None and place.sharded is sharded:
            self.place = place
        elif early is not None:
            assert isinstance(tensor, nn.Parameter), "only parameters are sharded"
            early.check_untouched(tensor, self.names[0])
            self.parts = [(p.in_tensor, early.shard[p.in_shard.as_slice()]) for p in early.pieces]
        elif isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            check_parameter(tensor, self.names[0])
            self.parts = [(Span(0, tensor.numel()), tensor.detach().view(-1))]
        elif not tensor.is_meta:
            self.parts = [(Span(0, tensor.numel()), tensor)]  # a buffer may have any strides

    def spans(self, group: Group) -> list[Span]:
        """The elements that this rank keeps, or is going to."""
        if self.is_meta:
            layout = plan_early(self.tensor.numel(), group)
            return [piece.in_tensor for piece in layout.pieces(group.rank)]
        if self.place is not None and self.place.buffer.whole is not None:
            return [Span(0, self.tensor.numel())]
        if self.place is not None:
            piece = self.place.piece
            return [] if piece is None else [piece.in_tensor]
        return [span for span, _ in self.parts]

    def allocate(self, group: Group) -> None:
        """Give it memory, as `Init` would have left it."""
        if isinstance(self.tensor, nn.Parameter):
            allocate_blank(self.tensor, self.names[0], group=group)
        else:
            allocate_blank_buffer(self.tensor, group=group)
        self.find_parts(None)

    def fill(self, reader: AbstractRangeReader) -> None:
        """Read this rank's part, where it is in no place."""
        for span, memory in self.parts:
            if memory.dim() == 1 and memory.is_contiguous():
                read_into(memory, reader, span)
            else:
                memory.copy_(reader.read(span.start, span.stop).view(memory.shape))
        early = find_early(self.tensor)
        if early is not None:
            if early.is_blank:
                early.shard[early.payload.numel() :].zero_()
            early.is_blank = False


def targets_of(model: nn.Module) -> Iterator[Target]:
    """Every parameter and persistent buffer once, with all its names in `state_dict`."""
    found: dict[int, Target] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for own in (module._parameters, module._buffers):
            for key, tensor in own.items():
                if tensor is None or key in module._non_persistent_buffers_set:
                    continue
                target = found.setdefault(id(tensor), Target((), tensor))
                target.names = (*target.names, start + key)
    yield from found.values()


def allocate_missing(model: nn.Module, targets: Iterable[Target], group: Group) -> None:
    """Give what is on the meta device memory."""
    for target in targets:
        if target.is_meta:
            target.allocate(group)
    for module in model.modules():
        if any(p is not None and find_early(p) is not None for p in module._parameters.values()):
            guard_module(module)


def in_chunks(span: Span, dtype: torch.dtype) -> Iterator[Span]:
    """Runs of the span, none larger than a chunk."""
    step = max(1, CHUNK_BYTES // dtype.itemsize)
    for start in range(span.start, span.stop, step):
        yield Span(start, min(start + step, span.stop))


# ---- What speaks against loading, found before anything is written ----


def find_problems(
    model: nn.Module,
    targets: Iterable[Target],
    readers: NamedReaders,
    *,
    reports_missing: bool,
) -> list[str]:
    """What in the source does not fit the model, or is not there for it to work."""
    problems = []
    for target in targets:
        expected, given = target.tensor, target.given(readers)
        for name in given:
            problems += find_misfits(name, expected.shape, expected.dtype, readers[name])
        if not given and target.is_meta and reports_missing:
            problems.append(f"{target.names[0]!r} is on the meta device and has no weights")
    lost = [
        name
        for name, buffer in model.named_buffers()
        if buffer.is_meta and not any(target.tensor is buffer for target in targets)
    ] + plain_on_meta(model)
    if lost:
        problems.append(
            f"{', '.join(map(repr, lost))}: on the meta device, and no part of a state dict; "
            "compute them with zero_engine.materialise(model, init=fn) first, or build the model "
            "inside zero_engine.Init"
        )
    return problems


def find_misfits(
    name: str, shape: torch.Size, dtype: torch.dtype, reader: AbstractRangeReader
) -> list[str]:
    """What speaks against reading a tensor of this shape and dtype there; floats are converted."""
    problems = []
    if reader.shape != shape:
        problems.append(f"{name!r}: expected shape {tuple(shape)}, got {tuple(reader.shape)}")
    is_float = reader.dtype.is_floating_point and dtype.is_floating_point
    if reader.dtype != dtype and not is_float:
        problems.append(f"{name!r}: expected {dtype}, got {reader.dtype}")
    return problems


def find_different_ties(
    targets: Iterable[Target], readers: NamedReaders, group: Group
) -> list[str]:
    """Names of one tensor that come with different values, as far as this rank reads them."""
    problems = []
    for target in targets:
        first, *others = target.given(readers) or [""]
        for other in others:
            mine, theirs = readers[first], readers[other]
            if mine.shape == theirs.shape and any(
                not _same(mine.read(part.start, part.stop), theirs.read(part.start, part.stop))
                for span in target.spans(group)
                for part in in_chunks(span, mine.dtype)
            ):
                problems.append(f"{first!r} and {other!r} are one tensor, and differ")
    return problems


def _same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


# ---- Values and optimizer state from elsewhere into a partitioned model: all of it, or none ----


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
                fill_buffer(buffer, readers, sharded.residence.offload)
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
