"""Load values and optimizer state into a model: all of it, or none."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any, Final, TypeAlias, TypeVar

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from zero_comm import AnyRanks, Group, check_agreement, collective

from zero_partition.chained import load_extra_entries, members_of, options_of
from zero_partition.dtensors import is_dtensor, local_of, outer_of
from zero_partition.errors import LoadError, PartitionError, StateError
from zero_partition.init.context import guard_module
from zero_partition.init.early_shard import find_early
from zero_partition.init.materialize import allocate_blank, plain_on_meta
from zero_partition.init.units import check_parameter
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.memory.seams import MASTER, AbstractRangeReader, OptimizerOffload
from zero_partition.nested import foreign_classes, map_tensors, rebuild
from zero_partition.optimizer.needs import states_after_step
from zero_partition.optimizer.shards import (
    check_params_of,
    has_state_of,
    keys_for_whole,
    part_in_entry,
    part_of_entry,
)
from zero_partition.plan.layout import Span
from zero_partition.plan.stages import shown_all
from zero_partition.plan.wire import whole_of
from zero_partition.run.hooks import find_sharded
from zero_partition.run.sharded_model import ModelPhase, ParamRef, ShardedModel, find_param_ref
from zero_partition.stand_in import StateKind
from zero_partition.torch_private import non_persistent_buffers, own_buffers, own_parameters

from .custom_loading import CustomLoading, StateDictLayout, customizes_state_dict
from .runs import (
    EntryPart,
    LocalState,
    gives_own,
    in_chunks,
    keeps_own_masters,
    kept_as_json,
    owner_of,
    read_into,
)
from .split_readers import in_source, reader_of_part

# How a step is computed is the new run's choice; these are not what is trained, but how.
_NOT_RESTORED: Final = frozenset({"foreach", "fused", "capturable", "differentiable", "cut"})

T = TypeVar("T")
NamedReaders: TypeAlias = Mapping[str, AbstractRangeReader]


@define(eq=False)
class Target:
    """One parameter or persistent buffer, and where this rank keeps which part of it."""

    # All its names in `state_dict`.
    names: tuple[str, ...]
    tensor: Tensor
    # Set for a parameter of the sharded model that is loaded into.
    param_ref: ParamRef | None = None
    # Set for other tensors: memory of this rank's part, 1-D or in the tensor's own shape.
    memory: Tensor | None = None
    # Elements that this rank keeps.
    kept: Span = field(factory=lambda: Span(0, 0))
    # Name in the source -> reader; values are read by the first.
    found: dict[str, AbstractRangeReader] = field(factory=dict)

    @property
    def reader(self) -> AbstractRangeReader:
        """Return the reader of its values: the first that was found."""
        return next(iter(self.found.values()))

    def match(self, readers: NamedReaders, ties: Mapping[str, str]) -> list[str]:
        """Find the readers under its names; returns the problems with reading them."""
        names = dict.fromkeys(ties.get(name, name) for name in self.names)
        whole = {name: readers[name] for name in names if name in readers}
        self.found = {name: reader_of_part(self.tensor, reader) for name, reader in whole.items()}
        shape, dtype = outer_of(self.tensor).shape, self.tensor.dtype
        return [p for name, r in whole.items() for p in find_misfits(name, shape, dtype, r)]

    def find_memory(self, sharded: ShardedModel | None) -> None:
        """Find this rank's part and its memory. There is none of a tensor on the meta device.

        `sharded` is the model that is loaded into, None if that is not sharded.
        """
        tensor, early = self.tensor, find_early(self.tensor)
        param_ref = self.param_ref or find_param_ref(tensor)
        if param_ref is not None and sharded is not None and param_ref.sharded is sharded:
            is_whole = param_ref.buffer.whole is not None
            numel = param_ref.plan.shape.numel()
            self.param_ref, self.kept = param_ref, Span(0, numel) if is_whole else param_ref.kept
        elif early is not None:
            assert isinstance(tensor, nn.Parameter), "only parameters are sharded"
            early.check_untouched(tensor, self.names[0])
            self.memory, self.kept = early.payload, early.kept
        elif not tensor.is_meta:
            memory = local_of(tensor)
            self.kept, self.memory = Span(0, memory.numel()), memory
            if isinstance(tensor, nn.Parameter):
                check_parameter(memory, self.names[0])
                self.memory = memory.detach()

    def fill(self) -> None:
        """Read this rank's part into `memory`, for a tensor of no sharded model."""
        memory, kept = self.memory, self.kept
        assert memory is not None, "it was found"
        if memory.is_contiguous():
            read_into(memory.view(-1), self.reader, kept)
        else:
            memory.copy_(self.reader.read(kept.start, kept.stop).view(memory.shape))
        early = find_early(self.tensor)
        if early is not None:
            early.mark_written()


def targets_of(model: nn.Module) -> Iterator[Target]:
    """Yield every parameter and persistent buffer once, with all its names in `state_dict`."""
    found: dict[int, Target] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for own in (own_parameters(module), own_buffers(module)):
            for key, tensor in own.items():
                if tensor is None or key in non_persistent_buffers(module):
                    continue
                target = found.setdefault(id(tensor), Target((), tensor))
                target.names = (*target.names, start + key)
    yield from found.values()


def allocate_missing(model: nn.Module, targets: Iterable[Target], group: Group) -> None:
    """Allocate tensors that are on the meta device, as `Init` would have left them."""
    for target in targets:
        if not target.tensor.is_meta:
            continue
        allocate_blank(target.tensor, target.names[0], group=group)
        target.find_memory(None)
    for module in model.modules():
        if any(p is not None and find_early(p) for p in own_parameters(module).values()):
            guard_module(module)


def fill_buffer(buffer: FlatBuffer, readers: Mapping[int, AbstractRangeReader]) -> None:
    """Read parameters, by position, to this rank's values and masters. Local.

    Masters are not rounded to the parameters' dtype. Where values are offloaded, it needs memory
    for one shard of them.
    """
    whole, main_shard = buffer.whole, buffer.main_shard
    if whole is not None:
        for position, reader in readers.items():
            span = buffer.plan.layout.spans[position]
            read_into(whole[span.as_slice()], reader, span.shifted(-span.start))
        buffer.note_write()
    if buffer.is_view and not buffer.has_masters:
        return
    mine = [piece for piece in buffer.pieces if piece.index in readers]
    values = main_shard.memory
    if values is None and len(mine) == len(buffer.pieces):
        device = buffer.group.device
        values = torch.zeros(buffer.shard_numel, dtype=main_shard.dtype, device=device)
    elif values is None:
        values = main_shard.read()
    for piece in mine:
        read_into(values[piece.in_shard.as_slice()], readers[piece.index], piece.in_tensor)
    if main_shard.memory is None:
        main_shard.write(values)
    if buffer.has_masters and not buffer.is_view:
        buffer.model_shard.write(values)


def _fill_own_masters(
    buffer: FlatBuffer, readers: Mapping[int, AbstractRangeReader], offload: OptimizerOffload
) -> None:
    """Write the masters that an optimizer offload keeps by itself for 16-bit parameters."""
    # The flat buffer has the masters, and `fill_buffer` wrote them.
    if buffer.main_shard.dtype != buffer.plan.dtype:
        return
    for piece in buffer.pieces if buffer.offloaded_params else ():
        reader, target = readers.get(piece.index), buffer.offloaded_params[piece.index]
        if reader is not None and target.dtype.is_floating_point and target.dtype.itemsize < 4:
            part = EntryPart(reader, piece.in_tensor, (piece.in_tensor.numel,))
            offload.write({target: {MASTER: part.read().float()}}, replaces=False)


def _fill(targets: Iterable[Target]) -> None:
    """Read all targets for which there is a reader. Local."""
    placed: dict[FlatBuffer, dict[int, AbstractRangeReader]] = {}
    offload: OptimizerOffload | None = None
    for target in targets:
        if target.found and target.param_ref is not None:
            placed.setdefault(target.param_ref.buffer, {})[target.param_ref.position] = (
                target.reader
            )
            offload = target.param_ref.sharded.residence.offload
        elif target.found:
            target.fill()
    for buffer, readers in placed.items():
        fill_buffer(buffer, readers)
        if offload is not None:
            _fill_own_masters(buffer, readers, offload)


def _describe_names(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    kinds = (("missing", missing), ("unexpected", unexpected))
    found = [
        f"{kind}: {shown_all([*map(repr, names)], separator=', ')}"
        for kind, names in kinds
        if names
    ]
    if not found:
        return found
    of_source, of_model = _prefix(unexpected, missing), _prefix(missing, unexpected)
    why = "these are weights of another model, or of one with other names"
    if of_source:
        adds = {"module.": "DistributedDataParallel", "_orig_mod.": "torch.compile"}.get(of_source)
        why = f"names of these weights begin with {of_source!r}, the model's do not"
        why += f": {adds} adds it, remove it" if adds else ""
    elif of_model:
        why = f"the model's names begin with {of_model!r}, those of these weights do not"
    return [why, *found]


def _such_as(names: Sequence[str]) -> str:
    first = repr(names[0])
    return first if len(names) == 1 else f"{len(names)} parameters, such as {first},"


def _prefix(names: Sequence[str], others: Sequence[str]) -> str:
    """Return what one name has before one of the others, if that makes others of all names."""
    known = {*others}
    first = names[0] if names else ""
    starts = (first[: -len(other)] for other in others if first.endswith(f".{other}"))
    return next((s for s in starts if {name.removeprefix(s) for name in names} <= known), "")


def find_misfits(
    name: str, shape: torch.Size, dtype: torch.dtype, reader: AbstractRangeReader
) -> list[str]:
    """Return why a reader does not fit a tensor of this shape and dtype; floats are converted."""
    problems = []
    if reader.shape != shape:
        problems.append(f"{name!r}: expected shape {tuple(shape)}, got {tuple(reader.shape)}")
    is_float = reader.dtype.is_floating_point and dtype.is_floating_point
    if reader.dtype != dtype and not is_float:
        problems.append(f"{name!r}: expected {dtype}, got {reader.dtype}")
    return problems


def _find_lost(model: nn.Module, targets: Sequence[Target]) -> list[str]:
    """Return the problems of tensors on the meta device that no source can fill."""
    known = {id(target.tensor) for target in targets}
    lost = [n for n, b in model.named_buffers() if b.is_meta and id(b) not in known]
    lost += plain_on_meta(model)
    split = [name for name, p in model.named_parameters() if p.is_meta and is_dtensor(p)]
    problems = [
        f"{name!r}: a DTensor on the meta device; call model.to_empty(device=...) first"
        for name in split
    ]
    if not lost:
        return problems
    return [
        *problems,
        f"{', '.join(map(repr, lost))}: on the meta device, and no part of a state dict; "
        "compute them with zero_engine.materialise(model, init=fn) first, or build the model "
        "inside zero_engine.Init",
    ]


def _find_different_ties(targets: Iterable[Target], group: Group) -> list[str]:
    """Names of one tensor that come with different values, as far as this rank reads them."""

    def are_same(target: Target, other: AbstractRangeReader) -> bool:
        first, span, numel = target.reader, target.kept, target.tensor.numel()
        # No rank keeps any of it yet, so each rank compares an equal run of elements.
        if target.tensor.is_meta:
            ends = (numel * rank // group.world_size for rank in (group.rank, group.rank + 1))
            span = Span(*ends)
        return first.dtype == other.dtype and all(
            torch.equal(first.read(part.start, part.stop), other.read(part.start, part.stop))
            for part in in_chunks(span, first.dtype)
        )

    return [
        f"{next(iter(target.found))!r} and {name!r} are one tensor, and differ"
        for target in targets
        for name, reader in list(target.found.items())[1:]
        if reader.shape == target.reader.shape and not are_same(target, reader)
    ]


@frozen(kw_only=True, eq=False)
class StateSource:
    """Source of a load: readers and values by names of `model.state_dict()`."""

    params: NamedReaders
    buffers: NamedReaders
    # Name of the source, for errors.
    where: str
    # Further name of a tied parameter -> its name in `params`.
    ties: Mapping[str, str] = field(factory=dict)
    # Names that may be missing; None: all.
    may_lack: frozenset[str] | None = frozenset()
    # Name -> entry -> reader or value; None: state is not loaded.
    states: Mapping[str, Mapping[str, Any]] | None = None
    # Options of each param group, with names under "params".
    param_groups: Sequence[Mapping[str, Any]] = ()
    # For each optimizer: its state that belongs to no parameter.
    shared: Sequence[Mapping[Any, Any]] = ()
    # For each optimizer: further entries of its state dict; see `extra_entries`.
    extra: Sequence[Mapping[str, Any]] = ()
    # As `StateParts.own_said`.
    own_said: Mapping[str, Any] = field(factory=dict)
    # Rank -> number of the tensor, as text -> reader; see NOTE(own) in runs.py.
    own: Mapping[int, NamedReaders] = field(factory=dict)
    # Keys for the model's own `load_state_dict()`; None: it is not called.
    layout: StateDictLayout | None = field(factory=StateDictLayout)


@define(eq=False)
class StateLoad:
    """A load that has been planned: nothing is written yet."""

    # None: the model is not sharded, and only values are loaded.
    sharded: ShardedModel | None
    source: StateSource
    # All parameters and persistent buffers.
    values: Sequence[Target]
    # Set if the model loads through methods or hooks of its own.
    custom: CustomLoading | None = None
    # Parameter -> entry -> `EntryPart` or value.
    states: dict[ParamRef, dict[str, Any]] = field(factory=dict)
    # Number of whole entries in `states`.
    num_entries: int = 0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    # Reasons why nothing may be loaded.
    problems: list[str] = field(factory=list)
    # State that is not loaded, since ranks with other shards saved it; each with the reason.
    begins_anew: list[str] = field(factory=list)

    @property
    def num_tensors(self) -> int:
        """Return how many whole tensors are going to be restored."""
        return sum(1 for target in self.values if target.found) + self.num_entries

    def spans(self) -> Iterator[tuple[AbstractRangeReader, Span]]:
        """Yield the spans that this rank is going to read, each with its reader of the source."""
        for part in chain.from_iterable(entries.values() for entries in self.states.values()):
            if isinstance(part, EntryPart):
                yield in_source(part.reader, part.span)
        yield from (in_source(target.reader, target.kept) for target in self.values if target.found)

    def apply(self) -> None:
        """Write all of it. Local, but every rank calls it."""
        sharded, source = self.sharded, self.source
        if sharded is not None:
            sharded.begin_write()
        with torch.no_grad():
            if sharded is not None and source.states is not None:
                # Before values, since it mends state that is torn.
                LocalState(sharded).write(self.states)
            # Reversed, since the values that a check has read last are still cached.
            _fill(reversed(self.values))
        if sharded is not None:
            if source.states is not None:
                _restore_options(sharded, source.param_groups)
                members = members_of(sharded.optimizer)
                for member, shared in zip(members, source.shared, strict=False):
                    member.state.update(shared)
                for member, extra in zip(members, source.extra, strict=False):
                    load_extra_entries(member, extra)
                if any(self.states.values()):
                    sharded.note_state()
            if sharded.residence.param_offload is not None:
                sharded.residence.param_offload.flush()
            sharded.end_write()
        if self.custom is not None:
            self.custom.finish()

    def give_up(self) -> None:
        """Undo changes of the model that planning has made: its buffers. Local."""
        if self.custom is not None:
            self.custom.undo()

    def rename(self, of_names: Mapping[str, T]) -> Mapping[str, T]:
        """Return the same by the model's names, where the source has others. Local."""
        return of_names if self.custom is None else self.custom.rename(of_names)

    def match_values(self) -> None:
        """Find readers for parameters and buffers, and where these are on this rank."""
        source = self.source
        for target in self.values:
            is_param = target.param_ref is not None
            self.problems += target.match(
                source.params if is_param else source.buffers, source.ties
            )
            if len(target.found) > 1 and is_param:
                names = " and ".join(map(repr, target.found))
                self.problems.append(f"{names} are one tensor here, and {len(target.found)} there")
            if target.found:
                target.find_memory(self.sharded)
        lacking = [target.names[0] for target in self.values if not target.found]
        may_lack = lacking if source.may_lack is None else source.may_lack
        self.missing = tuple(name for name in lacking if name not in may_lack)
        used = {name for target in self.values for name in target.found}
        given = dict.fromkeys((*source.params, *source.buffers))
        if self.sharded is not None:
            used |= self.sharded.routes.names_on_other_ranks
        self.unexpected = tuple(name for name in given if name not in used)
        if self.custom is not None:
            self.problems += self.custom.problems
            self.missing = (*self.missing, *self.custom.missing)
            self.unexpected = (*self.unexpected, *self.custom.unexpected)

    def match_states(self, sharded: ShardedModel, *, is_strict: bool) -> None:
        """Find what this rank keeps of each parameter's state."""
        source = self.source
        if sharded.optimizer is None:
            raise LoadError(
                f"{source.where}: the model was sharded without an optimizer to load into"
            )
        aliases = {
            alias: param_ref.name
            for param_ref in sharded.param_refs
            for alias in param_ref.plan.names
        }

        def by_name(found: Mapping[str, T] | None) -> dict[str, T]:
            return {aliases.get(name, name): value for name, value in (found or {}).items()}

        if is_strict and not source.param_groups and not source.states:
            self.problems.append(
                "it was saved without an optimizer; load(folder, model) loads the weights alone"
            )
            return
        mine = [group["params"] for group in param_groups_of(sharded)]
        theirs = [[aliases.get(n, n) for n in group["params"]] for group in source.param_groups]
        trained = set(chain.from_iterable(mine))
        states, params = by_name(source.states), by_name(source.params)
        states |= {
            param_ref.name: {
                key: reader_of_part(param_ref.param, value)
                for key, value in states[param_ref.name].items()
            }
            for param_ref in sharded.param_refs
            if param_ref.name in states
        }
        elsewhere = sharded.routes.names_on_other_ranks
        theirs = [[name for name in names if name not in elsewhere] for names in theirs]
        extra = [name for name in states if name not in trained | elsewhere]
        if is_strict and [*map(set, theirs)] != [*map(set, mine)]:
            self.problems.append(_describe_groups(mine, theirs))
        if is_strict and extra:
            self.problems.append(
                f"optimizer state of {', '.join(map(repr, extra))}, which is not trained"
            )
        own_said = by_name(source.own_said)
        own_entries = by_name(_own_entries(source))
        packages = {type(m).__module__.partition(".")[0] for m in members_of(sharded.optimizer)}
        found: dict[str, Set[str]] = {}
        for_whole = keys_for_whole(
            (p.plan.shape, states.get(p.name, {})) for p in sharded.param_refs
        )
        for param_ref in sharded.param_refs:
            if (name := param_ref.name) not in trained:
                continue
            state, own = dict(states.get(name, {})), own_said.get(name, {"entries": {}})
            mine, theirs_own = kept_as_json(param_ref), list(own.get("keeps", ()))
            # A rank that keeps none of a parameter that is on one rank has no state of it.
            keeps_state = has_state_of(param_ref.plan, Span(0, 0))
            needed = [kept for kept in mine if kept is not None or keeps_state]
            if own["entries"] and not all(kept in theirs_own for kept in needed):
                self.begins_anew.append(
                    f"optimizer state of {name!r}: {', '.join(map(repr, own['entries']))} of "
                    "it has no whole, and was saved by ranks that keep other parts of the parameter"
                )
                state, own = {}, {"entries": {}}
            self.num_entries += len(state)
            # With an optimizer offload, `_fill_own_masters` writes the masters.
            is_here = sharded.residence.offload is None
            if (
                state
                and name in params
                and is_here
                and keeps_own_masters(sharded, param_ref.buffer)
            ):
                state.setdefault(MASTER, reader_of_part(param_ref.param, params[name]))
            self.states[param_ref] = {}
            try:
                self.states[param_ref] = _part_of_state(param_ref, state, for_whole)
                # Entries without a whole: nested values, with readers in place of tensors.
                if own["entries"]:
                    given = _given_to(param_ref.group.rank, mine, theirs_own, own_entries[name])
                    self.problems += [
                        f"{name!r}: optimizer state is made of a {foreign}, of another package than"
                        " the optimizer, so none is made"
                        for foreign in foreign_classes(given, packages)
                    ]
                    self.states[param_ref] |= map_tensors(
                        given, EntryPart.all_of, AbstractRangeReader
                    )
            except (PartitionError, StateError) as error:
                self.problems.append(str(error))
            found[name] = _kept(state) - {MASTER} | own["entries"].keys()
        differ = _describe_entries(found, _expected_entries(sharded, source))
        (self.problems if is_strict else self.begins_anew).extend(differ)


@frozen
class StateLoadReport:
    """Names that did not match in a load that allowed it."""

    # Names that only the model has.
    missing: tuple[str, ...]
    # Names that only the source has.
    unexpected: tuple[str, ...]


@collective
def load_ranges(
    model: nn.Module,
    readers: Mapping[str, AbstractRangeReader] | Iterable[tuple[str, AbstractRangeReader]],
    *,
    group: AnyRanks,
    strict: bool = True,
    timeout_s: float = 60.0,
) -> StateLoadReport:
    """Read weights into a model, each rank only what it keeps. Collective; moves no weights.

    The model may be built by `Init`, on the meta device (it is then as `Init` would leave it),
    partitioned at any stage, or plain. Names are those of `model.state_dict()`: parameters and
    persistent buffers. A tied parameter may have any of its names, or several with the same values.
    Beyond the shards a rank needs 2 MiB, or the largest buffer.

    Values of a float dtype are rounded to the float dtype of the model, to nearest even; masters
    take them as they are. All other dtypes must be the model's.

    Args:
        model: What to fill.
        readers: Names and where to read them.
        group: The ranks that the model is, or will be, distributed over, as for `partition`.
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
    group, readers = whole_of(group), dict(readers)
    sharded = find_sharded(model)
    if sharded is not None:
        kinds = (StateKind.PARAMS, StateKind.MASTERS)
        sharded.require("load_ranges()", *kinds, no=(ModelPhase.FORWARD,))
        sharded.refuse_own_ranks("load_ranges()")
    source = StateSource(params=readers, buffers=readers, where="load_ranges()")
    source, custom = _through_modules(model, source)
    load = StateLoad(sharded, source, list(targets_of(model)), custom)
    load.match_values()
    problems = load.problems
    if strict:
        problems += _describe_names(load.missing, load.unexpected)
    else:
        blank = [t.names[0] for t in load.values if t.tensor.is_meta and not t.found]
        problems += [f"{name!r} is on the meta device and has no weights" for name in blank]
    problems += _find_lost(model, load.values)
    problems += _find_different_ties(load.values, group)
    content = [(name, tuple(r.shape), str(r.dtype)) for name, r in readers.items()]
    names = [target.names for target in load.values]
    facts = {
        "weights to load": f"{len(readers)} tensors ({zlib.crc32(repr(content).encode()):08x})",
        "what does not fit": "; ".join(problems),
        "model to load into": f"{zlib.crc32(repr(names).encode()):08x}",
    }
    try:
        check_agreement(facts, group=group, timeout_s=timeout_s)
        if problems:
            raise LoadError(f"cannot load, and nothing was written: {shown_all(problems)}")
    except BaseException:
        load.give_up()
        raise
    if sharded is not None:
        sharded.finish_update()
    allocate_missing(model, load.values, group)
    load.apply()
    return StateLoadReport(load.missing, load.unexpected)


def plan_load(sharded: ShardedModel, source: StateSource, *, is_strict: bool) -> StateLoad:
    """Plan what is read to where, and collect all problems. Local.

    Args:
        sharded: The model to load into.
        source: What to load.
        is_strict: Whether missing and unexpected names are problems.

    Raises:
        StateError: A forward is running, or parameters are gathered.
    """
    sharded.require("load()", no=(ModelPhase.FORWARD, ModelPhase.GATHERED))
    source, custom = _through_modules(sharded.model, source)
    params = [Target(p.plan.names, p.param, param_ref=p) for p in sharded.param_refs]
    buffers = [t for t in targets_of(sharded.model) if not isinstance(t.tensor, nn.Parameter)]
    load = StateLoad(sharded, source, [*params, *buffers], custom)
    load.match_values()
    if is_strict:
        load.problems = _describe_names(load.missing, load.unexpected) + load.problems
    # State does not fit where values do not, and is not what has to be mended.
    if source.states is not None and not load.problems:
        load.match_states(sharded, is_strict=is_strict)
    return load


def _through_modules(
    model: nn.Module, source: StateSource
) -> tuple[StateSource, CustomLoading | None]:
    """Let the model's own `load_state_dict()` say what is read to where, if it has one. Local."""
    if source.layout is None or not (source.layout.values or customizes_state_dict(model)):
        return source, None
    readers = {**source.params, **source.buffers}
    custom = CustomLoading(model, readers, source.ties, source.layout)
    custom.find()
    rename = custom.rename
    states = source.states if source.states is None else rename(source.states)
    groups = [
        {**group, "params": [custom.renamed.get(name, name) for name in group["params"]]}
        for group in source.param_groups
    ]
    return evolve(
        source,
        params=custom.readers,
        buffers=custom.readers,
        ties={},
        states=states,
        param_groups=groups,
        own_said=rename(source.own_said),
    ), custom


def _part_of_state(
    param_ref: ParamRef, state: Mapping[str, Any], for_whole: Collection[str]
) -> dict[str, Any]:
    """Return this rank's part of whole entries of state; see `keys_for_whole`.

    Raises:
        PartitionError: A shape that the parameter's cut does not explain.
    """
    param, span, is_sharded = param_ref.plan, param_ref.kept, param_ref.sharded.shards_state
    if is_sharded and not has_state_of(param, span):
        return {}
    has_all = not is_sharded or span.numel == param.shape.numel()
    parts: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, AbstractRangeReader):
            parts[key] = value if has_all else part_of_entry(param, key, value, span)
        elif is_sharded:
            parts[key] = EntryPart(value, *part_in_entry(param, key, value.shape, span, for_whole))
        else:
            parts[key] = EntryPart.all_of(value)
    return parts


def param_groups_of(sharded: ShardedModel) -> list[dict[str, Any]]:
    """Return the optimizer's param groups, with names in place of parameters. Local.

    Raises:
        PartitionError: A group that was added has parameters that the model lacks.
    """
    names = names_by_owner(sharded)
    if sharded.optimizer is not None:
        check_params_of(sharded.optimizer, names, sharded.model)
    groups = [] if sharded.optimizer is None else sharded.optimizer.param_groups
    return [
        {**_restored(group), "params": [names[id(param)] for param in group["params"]]}
        for group in groups
    ]


def names_by_owner(sharded: ShardedModel) -> dict[int, str]:
    """Return the names of parameters, by the id of the optimizer's parameter for each. Local.

    Between `add_param_group` and the next forward that is the model's own.
    """
    return {
        id(owner): param_ref.name
        for param_ref in sharded.param_refs
        for owner in (param_ref.param, owner_of(param_ref))
    }


def _restored(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options_of(group).items() if key not in _NOT_RESTORED}


def _restore_options(sharded: ShardedModel, given: Sequence[Mapping[str, Any]]) -> None:
    groups = [] if sharded.optimizer is None else sharded.optimizer.param_groups
    for group, options in zip(groups, given, strict=False):
        for key, value in _restored(options).items():
            live = group.get(key)
            # A compiled or captured step keeps options as tensors, and reads those.
            if isinstance(live, Tensor):
                live.copy_(torch.as_tensor(value, device=live.device))
            elif isinstance(value, Tensor):
                group[key] = value.clone()
            else:
                group[key] = value


def _given_to(rank: int, mine: Sequence[Any], theirs: Sequence[Any], own: Sequence[T]) -> T:
    """Return what was saved by a rank that kept the same elements: this one, if it kept none."""
    is_same = rank < len(theirs) and theirs[rank] == mine[rank] is None
    return own[rank if is_same or mine[rank] not in theirs else theirs.index(mine[rank])]


def _own_entries(source: StateSource) -> dict[str, list[dict[str, Any]]]:
    """Return each rank's values of entries without a whole, by the names that were saved.

    Raises:
        LoadError: A value cannot be rebuilt from what the source says.
    """
    in_order = {
        rank: iter([readers.get(str(number)) for number in range(len(readers))])
        for rank, readers in source.own.items()
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for name, said in source.own_said.items():
        found[name] = [{} for _ in said["keeps"]]
        for rank, own in enumerate(found[name]):
            gives = gives_own(said["keeps"], rank)
            for key, of_rank in said["entries"].items() if gives else ():
                try:
                    if of_rank[rank] is not None:
                        own[key] = rebuild(of_rank[rank], in_order.get(rank, iter(())))
                except StateError as error:
                    raise LoadError(
                        f"{source.where}: optimizer state {key!r} of {name!r}: {error}"
                    ) from error
    return found


def _describe_groups(mine: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]]) -> str:
    if len(mine) != len(theirs):
        return f"expected {len(mine)} param groups, got {len(theirs)}"
    pairs = enumerate(zip(mine, theirs, strict=True))
    index, (names, others) = next((i, pair) for i, pair in pairs if {*pair[0]} != {*pair[1]})
    lacking = [name for name in names if name not in others]
    extra = [name for name in others if name not in names]
    differ = [f"expected also {lacking}"] * bool(lacking) + [f"expected no {extra}"] * bool(extra)
    return (
        f"param group {index}: {' and '.join(differ)}; is it the optimizer of the same parameters?"
    )


def _kept(state: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of entries; None is how some say that there is none."""
    return frozenset(key for key, value in state.items() if value is not None)


def _describe_entries(
    found: Mapping[str, Set[str]], expected: Mapping[str, tuple[str, frozenset[str]]]
) -> list[str]:
    """Say which parameters' state has other entries than the optimizer keeps."""
    differing: dict[str, list[str]] = {}
    for name, entries in found.items():
        if not entries or name not in expected:
            continue
        kind, kept = expected[name]
        lacking, surplus = sorted(kept - entries), sorted(entries - kept)
        words = [f"lacks {', '.join(lacking)}"] * bool(lacking)
        words += [f"has {', '.join(surplus)}"] * bool(surplus)
        if words:
            text = f"{' and '.join(words)}; is it of another optimizer than {kind}? "
            text += "load(folder, model) loads the weights alone"
            differing.setdefault(text, []).append(name)
    return [f"optimizer state of {_such_as(names)} {text}" for text, names in differing.items()]


def _expected_entries(
    sharded: ShardedModel, source: StateSource
) -> dict[str, tuple[str, frozenset[str]]]:
    """Return what a step leaves as state of each parameter, where a trial on a tiny one shows it.

    Each with the name of the optimizer's class.

    Optimizers that are neither torch's nor ours are left out: their entries may depend on the
    parameter's size.
    """
    names, given = names_by_owner(sharded), iter(source.param_groups)
    num_dims = {param_ref.name: len(param_ref.plan.shape) for param_ref in sharded.param_refs}
    expected: dict[str, tuple[str, frozenset[str]]] = {}
    for member in members_of(sharded.optimizer):
        in_group = [[names[id(param)] for param in g["params"]] for g in member.param_groups]
        options = [_restored(next(given, {})) for _ in member.param_groups]
        dims = [sorted({num_dims[name] for name in of_group}) for of_group in in_group]
        tiny = [
            {n: nn.Parameter(torch.ones((2,) * n, device="cpu")) for n in of_group}
            for of_group in dims
        ]
        if not type(member).__module__.startswith(("torch.", "zero_")):
            continue
        of_tiny, kind = [list(of.values()) for of in tiny], type(member).__name__
        states = states_after_step(member, of_tiny, options)
        if states is None:
            # It cannot step with another optimizer's options.
            states = states_after_step(member, of_tiny)
        if states is None:
            continue
        for of_group, tried in zip(in_group, tiny, strict=True):
            expected |= {n: (kind, _kept(states.get(tried[num_dims[n]], {}))) for n in of_group}
    return expected
