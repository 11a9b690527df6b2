"""Values and optimizer state from elsewhere into a model: all of it, or none."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from zero_comm import Group, check_agreement, collective

from zero_partition.chained import members_of, options_of
from zero_partition.errors import LoadError, PartitionError
from zero_partition.init.context import guard_module
from zero_partition.init.early_shard import find_early, plan_early
from zero_partition.init.materialize import allocate_blank, allocate_blank_buffer, plain_on_meta
from zero_partition.init.units import check_parameter
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.memory.seams import MASTER, AbstractRangeReader, OptimizerOffload
from zero_partition.nested import map_tensors, rebuild
from zero_partition.optimizer.entries import keys_for_whole, part_in_entry, part_of_entry
from zero_partition.optimizer.needs import states_after_step
from zero_partition.plan.cuts import Cut
from zero_partition.plan.layout import FlatLayout, Span
from zero_partition.run.hooks import find_sharded
from zero_partition.run.sharded_model import ModelState, ParamRef, ShardedModel, find_place
from zero_partition.stand_in import StateKind

from .parts import in_batches
from .runs import keeps_own_masters, keeps_said, owner_of, target_of

CHUNK_BYTES: Final = 8 * 2**20  # what is in flight between a reader and what it fills
_ON_DEVICE_STEP: Final = ("capturable", "fused")  # options with which torch counts on the device

# How a step is computed is the new run's choice; these are not what is trained, but how.
_NOT_RESTORED: Final = frozenset({"foreach", "fused", "capturable", "differentiable", "cut"})

T = TypeVar("T")
NamedReaders: TypeAlias = Mapping[str, AbstractRangeReader]


def read_into(memory: Tensor, reader: AbstractRangeReader, span: Span) -> None:
    """Fill 1-D memory with elements of a reader, some at a time."""
    for part in in_chunks(span, reader.dtype):
        memory[part.shifted(-span.start).as_slice()].copy_(reader.read(part.start, part.stop))


def in_chunks(span: Span, dtype: torch.dtype) -> Iterator[Span]:
    """Runs of the span, none larger than a chunk."""
    step = max(1, CHUNK_BYTES // dtype.itemsize)
    for start in range(span.start, span.stop, step):
        yield Span(start, min(start + step, span.stop))


@define(eq=False)
class Target:
    """One parameter or persistent buffer, and where this rank keeps which part of it."""

    names: tuple[str, ...]  # all it has in `state_dict`
    tensor: Tensor
    place: ParamRef | None = None  # in a model that is sharded
    memory: Tensor | None = None  # else: where this rank keeps its part; a buffer's own shape
    kept: Span = field(factory=lambda: Span(0, 0))  # elements that are there
    found: dict[str, AbstractRangeReader] = field(factory=dict)  # to be read; of one, the first

    @property
    def reader(self) -> AbstractRangeReader:
        """What it is read from."""
        return next(iter(self.found.values()))

    def match(self, readers: NamedReaders, ties: Mapping[str, str]) -> list[str]:
        """Find what there is under its names; returns what speaks against reading it."""
        names = dict.fromkeys(ties.get(name, name) for name in self.names)
        self.found = {name: readers[name] for name in names if name in readers}
        shape, dtype = self.tensor.shape, self.tensor.dtype
        return [p for name, r in self.found.items() for p in find_misfits(name, shape, dtype, r)]

    def find_memory(self, sharded: ShardedModel | None) -> None:
        """Find what this rank keeps, in a model that is `sharded`, or not. Nothing if on meta."""
        tensor, early = self.tensor, find_early(self.tensor)
        place = self.place or find_place(tensor)
        if place is not None and sharded is not None and place.sharded is sharded:
            is_whole = place.buffer.whole is not None
            self.place, self.kept = place, Span(0, tensor.numel()) if is_whole else place.kept
        elif early is not None:
            assert isinstance(tensor, nn.Parameter), "only parameters are sharded"
            early.check_untouched(tensor, self.names[0])
            self.memory = early.payload
            self.kept = _kept_early(early.layout, early.group)
        elif not tensor.is_meta:
            self.kept, self.memory = Span(0, tensor.numel()), tensor
            if isinstance(tensor, nn.Parameter):
                check_parameter(tensor, self.names[0])
                self.memory = tensor.detach()

    def kept_by(self, group: Group) -> Span:
        """The elements that this rank keeps, or is going to."""
        is_meta = self.tensor.is_meta
        return _kept_early(plan_early(self.tensor.numel(), group), group) if is_meta else self.kept

    def fill(self) -> None:
        """Read this rank's part, where it is in no place."""
        memory, kept = self.memory, self.kept
        assert memory is not None, "it was found"
        if memory.is_contiguous():
            read_into(memory.view(-1), self.reader, kept)
        else:
            memory.copy_(self.reader.read(kept.start, kept.stop).view(memory.shape))
        early = find_early(self.tensor)
        if early is not None:
            if early.is_blank:
                early.shard[early.payload.numel() :].zero_()
            early.is_blank = False


def _kept_early(layout: FlatLayout, group: Group) -> Span:
    return next((piece.in_tensor for piece in layout.pieces(group.rank)), Span(0, 0))


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
    """Give what is on the meta device memory, as `Init` would have left it."""
    for target in targets:
        if not target.tensor.is_meta:
            continue
        if isinstance(target.tensor, nn.Parameter):
            allocate_blank(target.tensor, target.names[0], group=group)
        else:
            allocate_blank_buffer(target.tensor, group=group)
        target.find_memory(None)
    for module in model.modules():
        if any(p is not None and find_early(p) is not None for p in module._parameters.values()):
            guard_module(module)


def fill_buffer(
    buffer: FlatBuffer, readers: Mapping[int, AbstractRangeReader], offload: OptimizerOffload | None
) -> None:
    """Read parameters, by position, to where they rest on this rank; masters are unrounded. Local.

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


def _fill_own_masters(
    buffer: FlatBuffer, readers: Mapping[int, AbstractRangeReader], offload: OptimizerOffload
) -> None:
    """Those that an optimizer offload keeps of its own accord, of parameters of 16 bits."""
    for piece in buffer.pieces:
        reader, target = readers.get(piece.index), buffer.targets[piece.index]
        if reader is None or not target.dtype.is_floating_point or target.dtype.itemsize >= 4:
            continue
        values = torch.empty(piece.in_tensor.numel, dtype=torch.float32)
        read_into(values, reader, piece.in_tensor)
        offload.write({target: {MASTER: values}}, replaces=False)


def _fill(targets: Iterable[Target], offload: OptimizerOffload | None) -> None:
    """Read all for which there is something. Local."""
    placed: dict[FlatBuffer, dict[int, AbstractRangeReader]] = {}
    for target in targets:
        if target.found and target.place is not None:
            placed.setdefault(target.place.buffer, {})[target.place.position] = target.reader
        elif target.found:
            target.fill()
    for buffer, readers in placed.items():
        fill_buffer(buffer, readers, offload)


def _describe_names(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    kinds = (("missing", missing), ("unexpected", unexpected))
    return [f"{kind}: {', '.join(map(repr, names))}" for kind, names in kinds if names]


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


def _find_lost(model: nn.Module, targets: Sequence[Target]) -> list[str]:
    """What no source can have, and the model needs to work."""
    known = {id(target.tensor) for target in targets}
    lost = [n for n, b in model.named_buffers() if b.is_meta and id(b) not in known]
    lost += plain_on_meta(model)
    if not lost:
        return []
    return [
        f"{', '.join(map(repr, lost))}: on the meta device, and no part of a state dict; "
        "compute them with zero_engine.materialise(model, init=fn) first, or build the model "
        "inside zero_engine.Init"
    ]


def _find_different_ties(targets: Iterable[Target], group: Group) -> list[str]:
    """Names of one tensor that come with different values, as far as this rank reads them."""

    def is_same(mine: AbstractRangeReader, theirs: AbstractRangeReader, part: Span) -> bool:
        values = [reader.read(part.start, part.stop) for reader in (mine, theirs)]
        return values[0].dtype == values[1].dtype and torch.equal(*values)

    return [
        f"{next(iter(target.found))!r} and {name!r} are one tensor, and differ"
        for target in targets
        for name, reader in list(target.found.items())[1:]
        if reader.shape == target.reader.shape
        and not all(
            is_same(target.reader, reader, part)
            for part in in_chunks(target.kept_by(group), target.reader.dtype)
        )
    ]


@frozen
class LoadReport:
    """What did not match, where that was allowed."""

    missing: tuple[str, ...]  # in the model only
    unexpected: tuple[str, ...]  # in the source only


@collective
def load_ranges(
    model: nn.Module,
    readers: Mapping[str, AbstractRangeReader] | Iterable[tuple[str, AbstractRangeReader]],
    *,
    group: Group,
    strict: bool = True,
    timeout_s: float = 60.0,
) -> LoadReport:
    """Read weights into a model, each rank only what it keeps. Collective; moves no weights.

    The model may be built by `Init`, on the meta device (it is then as `Init` would leave it),
    partitioned at any stage, or plain. Names are those of `model.state_dict()`: parameters and
    persistent buffers. A tied parameter may come under any of its names, or under several that
    hold the same values. Beyond the shards a rank needs 8 MiB, or the largest buffer.

    Values of a float dtype are rounded to the float dtype of the model, to nearest even; masters
    take them as they are. All other dtypes must be the model's.

    Args:
        model: What to fill.
        readers: Names and where to read them.
        group: The ranks that the model is, or will be, distributed over.
        strict: Whether missing and unexpected names are errors.
        timeout_s: How long to wait for ranks that do not call this, in seconds.

    Returns:
        The names that did not match; none if strict.

    Raises:
        LoadError: Names all that is missing, unexpected, of another shape or dtype, tied but
            different, or left on the meta device. Nothing was written.
        StateError: A forward is running.
        zero_comm.AgreementError: Ranks have different models or sources.
        zero_comm.CommError: A rank did not take part in time.
    """
    readers = dict(readers)
    sharded = find_sharded(model)
    if sharded is not None:
        kinds = (StateKind.PARAMS, StateKind.MASTERS)
        sharded.require("load_ranges()", *kinds, no=(ModelState.FORWARD,))
    targets = list(targets_of(model))
    problems = [problem for target in targets for problem in target.match(readers, {})]
    for target in targets:
        if target.found:
            target.find_memory(sharded)
    known = {name for target in targets for name in target.names}
    report = LoadReport(
        missing=tuple(target.names[0] for target in targets if not target.found),
        unexpected=tuple(name for name in readers if name not in known),
    )
    if strict:
        problems += _describe_names(report.missing, report.unexpected)
    else:
        blank = [
            target.names[0] for target in targets if target.tensor.is_meta and not target.found
        ]
        problems += [f"{name!r} is on the meta device and has no weights" for name in blank]
    problems += _find_lost(model, targets)
    problems += _find_different_ties(targets, group)
    content = [(name, tuple(r.shape), str(r.dtype)) for name, r in readers.items()]
    facts = {
        "weights to load": f"{len(readers)} tensors ({zlib.crc32(repr(content).encode()):08x})",
        "what does not fit": "; ".join(problems),
        "model to load into": f"{zlib.crc32(repr([t.names for t in targets]).encode()):08x}",
    }
    check_agreement(facts, group=group, timeout_s=timeout_s)
    if problems:
        raise LoadError(f"cannot load, and nothing was written: {'; '.join(problems)}")

    if sharded is not None:
        sharded.finish_update()
        sharded.begin_write()
    allocate_missing(model, targets, group)
    with torch.no_grad():
        _fill(targets, None if sharded is None else sharded.residence.offload)
    if sharded is not None:
        if sharded.residence.home is not None:
            sharded.residence.home.settle()
        sharded.end_write()
    return report


@frozen(eq=False)
class EntryPart:
    """This rank's part of one entry that is going to be read."""

    reader: AbstractRangeReader
    span: Span
    shape: tuple[int, ...]

    @classmethod
    def all_of(cls, reader: AbstractRangeReader) -> EntryPart:
        """Every element of it."""
        return cls(reader, Span(0, reader.shape.numel()), tuple(reader.shape))

    def fill(self, memory: Tensor) -> Tensor:
        """Read it into a tensor of its shape."""
        read_into(memory.view(-1), self.reader, self.span)
        return memory


@define(eq=False)
class StateTarget:
    """One parameter's state in the optimizer: what it is going to be."""

    place: ParamRef
    entries: dict[str, Any] = field(factory=dict)  # EntryPart, or a value; what is kept here
    num_entries: int = 0  # whole ones, that some rank keeps

    def plan(self, state: Mapping[str, Any], for_whole: Collection[str]) -> None:
        """Take this rank's part of the whole entries; see `keys_for_whole`.

        Raises:
            PartitionError: A shape that the parameter's cut does not explain.
        """
        param, span = self.place.plan, self.place.kept
        is_sharded, numel = self.place.sharded.shards_state, param.shape.numel()
        if is_sharded and param.cut != Cut.FLAT and numel and not span.numel:
            return  # another rank has all of it
        for key, value in state.items():
            if not isinstance(value, AbstractRangeReader):
                has_all = not is_sharded or span.numel == numel
                self.entries[key] = value if has_all else part_of_entry(param, key, value, span)
            elif is_sharded:
                part, shape = part_in_entry(param, key, value.shape, span, for_whole)
                self.entries[key] = EntryPart(value, part, shape)
            else:
                self.entries[key] = EntryPart.all_of(value)


def write_states(sharded: ShardedModel, targets: Sequence[StateTarget]) -> None:
    """Make these the states of their parameters. Local."""
    if sharded.residence.offload is not None:
        _write_elsewhere(sharded, targets)
        return
    member_of: dict[nn.Parameter, tuple[torch.optim.Optimizer, dict[str, Any]]] = {
        param: (member, group)
        for member in members_of(sharded.optimizer)
        for group in member.param_groups
        for param in group["params"]
    }
    for target in targets:
        owner = owner_of(target.place)
        if owner not in member_of:
            continue
        member, group = member_of[owner]
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
    # None stands for a state that is going to be empty.
    entries = [(target, key) for target in targets for key in target.entries or (None,)]
    for batch in in_batches(entries, _bytes_of_entry):
        states: dict[bool, dict[nn.Parameter, dict[str, Any]]] = {True: {}, False: {}}
        for target, key in batch:
            param = target_of(target.place)
            if param is None or not sharded.residence.is_stepped(param):
                continue  # frozen, though in a param group
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


def _bytes_of_entry(item: tuple[StateTarget, str | None]) -> int:
    part = None if item[1] is None else item[0].entries[item[1]]
    return part.span.numel * part.reader.dtype.itemsize if isinstance(part, EntryPart) else 0


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
    values: Sequence[Target]
    states: Sequence[StateTarget]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    problems: tuple[str, ...]
    begins_anew: tuple[str, ...]  # state that is of other shards, each with why

    @property
    def num_tensors(self) -> int:
        """That are going to be restored, whole ones."""
        num_values = sum(1 for target in self.values if target.found)
        return num_values + sum(target.num_entries for target in self.states)

    def apply(self) -> None:
        """Write all of it. Local, but every rank calls it."""
        sharded = self.sharded
        sharded.begin_write()
        with torch.no_grad():
            if self.source.states is not None:
                write_states(sharded, self.states)  # first: it mends state that is torn
            _fill(self.values, sharded.residence.offload)
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
    sharded.require("load()", no=(ModelState.FORWARD, ModelState.GATHERED))
    problems: list[str] = []
    begins_anew: list[str] = []
    values = _plan_values(sharded, source, problems)
    missing = [
        target.names[0]
        for target in values
        if not target.found
        and source.may_lack is not None
        and target.names[0] not in source.may_lack
    ]
    used = {name for target in values for name in target.found}
    unexpected = [name for name in (*source.params, *source.buffers) if name not in used]
    states: list[StateTarget] = []
    if source.states is not None:
        states = _plan_states(
            sharded, source, source.states, problems, begins_anew, is_strict=is_strict
        )
    if is_strict:
        problems += _describe_names(missing, unexpected)
    return StateLoad(
        sharded,
        source,
        values,
        states,
        tuple(missing),
        tuple(unexpected),
        tuple(problems),
        tuple(begins_anew),
    )


def _plan_values(sharded: ShardedModel, source: StateSource, problems: list[str]) -> list[Target]:
    """All parameters and persistent buffers, and what is read to each."""
    params = [Target(p.plan.names, p.param, place=p) for p in sharded.places]
    buffers = [t for t in targets_of(sharded.model) if not isinstance(t.tensor, nn.Parameter)]
    for target in (*params, *buffers):
        target.find_memory(sharded)
        readers = source.buffers if target.place is None else source.params
        problems += target.match(readers, source.ties)
        if len(target.found) > 1 and target.place is not None:
            names = " and ".join(map(repr, target.found))
            problems.append(f"{names} are one tensor here, and {len(target.found)} there")
    return [*params, *buffers]


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
    return {id(owner_of(place)): place.name for place in sharded.places}


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
    aliases = {alias: place.name for place in sharded.places for alias in place.plan.names}

    def by_name(found: Mapping[str, T]) -> dict[str, T]:
        return {aliases.get(name, name): value for name, value in found.items()}

    theirs = [
        [aliases.get(name, name) for name in group["params"]] for group in source.param_groups
    ]
    if is_strict and theirs != [group["params"] for group in mine]:
        problems.append(_describe_groups(mine, theirs))
    state_by_name, own_said = by_name(given), by_name(source.own_said)
    own_entries = by_name(_own_entries(source, sharded.group.rank))
    params_by_name = by_name(source.params)
    trained = {name for group in mine for name in group["params"]}
    extra = [name for name in state_by_name if name not in trained]
    if extra and is_strict:
        problems.append(f"optimizer state of {', '.join(map(repr, extra))}, which is not trained")
    expected = _expected_entries(sharded, source)
    for_whole = keys_for_whole(
        (p.plan.shape, state_by_name.get(p.name, {})) for p in sharded.places
    )
    is_sharded = sharded.shards_state
    targets = []
    for place in sharded.places:
        if place.name not in trained:
            continue
        name = place.name
        state = dict(state_by_name.get(name, {}))
        own = own_said.get(name, {"entries": {}})
        if own["entries"] and not (is_sharded and keeps_said(place) == list(own["keeps"])):
            begins_anew.append(
                f"optimizer state of {name!r}: {', '.join(map(repr, own['entries']))} of "
                "it has no whole, and was saved by ranks that keep other parts of the parameter"
            )
            state, own = {}, {"entries": {}}
        target = StateTarget(place, num_entries=len(state))
        if state and name in params_by_name and keeps_own_masters(sharded, place.buffer):
            state.setdefault(MASTER, params_by_name[name])  # as a file has them
        try:
            target.plan(state, for_whole)
            if own["entries"]:
                of_rank = own_entries[name]  # what has no whole: nests, with readers for tensors
                target.entries |= map_tensors(of_rank, EntryPart.all_of, AbstractRangeReader)
        except PartitionError as error:
            problems.append(str(error))
        known = state.keys() | own["entries"].keys()
        lacking = sorted(expected.get(name, frozenset()) - known) if known else []
        if lacking and is_strict:
            problems.append(f"{name!r}: optimizer state lacks {', '.join(lacking)}")
        targets.append(target)
    return targets


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
    num_dims = {place.name: len(place.plan.shape) for place in sharded.places}
    expected: dict[str, frozenset[str]] = {}
    for member in members_of(sharded.optimizer):
        in_group = [[names[id(param)] for param in g["params"]] for g in member.param_groups]
        options = [_restored(next(given, {})) for _ in member.param_groups]
        dims = [sorted({num_dims[name] for name in of_group}) for of_group in in_group]
        tiny = [{n: nn.Parameter(torch.ones((2,) * n)) for n in of_group} for of_group in dims]
        states = states_after_step(member, [list(of.values()) for of in tiny], options)
        if states is None:
            continue
        for of_group, tried in zip(in_group, tiny, strict=True):
            expected |= {n: frozenset(states.get(tried[num_dims[n]], ())) for n in of_group}
    return expected
