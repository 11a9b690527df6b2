"""Elements of parameters and their state in the memory of each rank, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, Final, Self, TypeAlias

import torch
from attrs import asdict, define, field, frozen
from torch import Tensor, nn
from zero_comm import Group, all_gather_flat, all_gather_json, broadcast_flat

from zero_partition.chained import extra_entries, members_of, shared_state
from zero_partition.dtensors import part_index, split_of
from zero_partition.errors import StateError
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.memory.seams import MASTER, AbstractRangeReader, OptimizerOffload
from zero_partition.nested import (
    describe,
    described_tensors,
    flat_entries,
    is_plain,
    is_strange,
    keys_of_entry,
    map_tensors,
    nested_entries,
    rebuild,
)
from zero_partition.optimizer.shards import (
    Entry,
    EntryInfo,
    PerRankEntry,
    PlainEntry,
    TensorEntry,
    plan_entry,
)
from zero_partition.plan.layout import Span, in_batches
from zero_partition.plan.split import Split
from zero_partition.run.sharded_model import (
    ParamRef,
    ShardedModel,
    find_param_ref,
    part_of,
)

# Bytes of offloaded state that are read or written together.
BATCH_BYTES: Final = 16 * 2**20
# Largest run that is read from a file at a time, in bytes.
CHUNK_BYTES: Final = 2 * 2**20
# Options with which torch keeps step counters on the device.
_ON_DEVICE_STEP: Final = ("capturable", "fused")

# Entry -> facts about it.
StateInfo: TypeAlias = dict[str, EntryInfo]
# Parameter -> entry -> value.
States: TypeAlias = Mapping[ParamRef, Mapping[str, Any]]


def belongs_on_device(key: str, group: Mapping[str, Any]) -> bool:
    """Return whether torch's optimizers move an entry that they load to its parameter's device."""
    return key != "step" or any(group.get(option) for option in _ON_DEVICE_STEP)


# NOTE(own): an entry without a whole can be loaded if each rank keeps the same elements of the
# parameter as some rank kept when it was saved: it gets that rank's value. For each parameter with
# such entries, a description says which elements each rank keeps, and what each rank has, in the
# form of `describe`. The tensors are given in the description's order, by the rank that has them.
# Of ranks that keep the same elements, only the first gives its tensors.

# NOTE(batches): offloaded state is read and written a whole sub-group at a time, even if only a
# small part of it is needed. So parts come in batches; a larger part is a batch of its own.


def in_chunks(span: Span, dtype: torch.dtype) -> Iterator[Span]:
    """Runs of the span, none larger than a chunk."""
    step = max(1, CHUNK_BYTES // dtype.itemsize)
    for start in range(span.start, span.stop, step):
        yield Span(start, min(start + step, span.stop))


def read_into(memory: Tensor, reader: AbstractRangeReader, span: Span) -> None:
    """Fill 1-D memory with elements of a reader, some at a time."""
    for part in in_chunks(span, reader.dtype):
        reader.read_into(memory[part.shifted(-span.start).as_slice()], part.start)


def param_refs_in(buffer: FlatBuffer) -> list[ParamRef]:
    """Return the `ParamRef` of each of its parameters, in order."""
    return [
        param_ref for param in buffer.params if (param_ref := find_param_ref(param)) is not None
    ]


def trained_values(sharded: ShardedModel, buffer: FlatBuffer) -> Tensor:
    """Return this rank's values as they are updated, 1-D: masters where there are some. Local.

    Masters that the optimizer keeps by itself count too. The result may be the memory itself, and
    is only for reading.
    """
    buffer.follow_writes()
    if not keeps_own_masters(sharded, buffer):
        return buffer.trained
    values = buffer.trained.to(torch.float32)
    states = LocalState(sharded).read(param_refs_in(buffer), {MASTER})
    for param_ref, state in states.items():
        if MASTER in state:
            part_of(param_ref, values).copy_(_elements(state[MASTER], param_ref, param_ref.kept))
    return values


def keeps_own_masters(sharded: ShardedModel, buffer: FlatBuffer) -> bool:
    """Return whether the optimizer keeps masters of these parameters by itself, and says so."""
    dtype = buffer.main_shard.dtype
    is_narrow = dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
    keeps = getattr(sharded.optimizer, "keeps_masters", False)
    return is_narrow and buffer.plan.trainable and bool(keeps)


@frozen(eq=False)
class EntryPart:
    """This rank's part of one entry of state that is going to be read."""

    reader: AbstractRangeReader
    span: Span
    shape: tuple[int, ...]

    @classmethod
    def all_of(cls, reader: AbstractRangeReader) -> EntryPart:
        """Return the part that is every element of an entry."""
        return cls(reader, Span(0, reader.shape.numel()), tuple(reader.shape))

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements, in the dtype of the reader."""
        return self.span.numel * self.reader.dtype.itemsize

    def read(self, there: Any = None, device: torch.device | None = None) -> Tensor:
        """Read it into `there` if that fits, else into a new tensor, on the host by default."""
        if not (isinstance(there, Tensor) and there.shape == self.shape and there.is_contiguous()):
            there = torch.empty(self.shape, dtype=self.reader.dtype, device=device or "cpu")
        read_into(there.detach().view(-1), self.reader, self.span)
        return there.detach()


def owner_of(param_ref: ParamRef) -> nn.Parameter:
    """Return the optimizer's parameter: the shard, or at stage 0 the parameter itself."""
    buffer = param_ref.buffer
    return (buffer.shard_params if param_ref.sharded.shards_state else buffer.params)[
        param_ref.position
    ]


def states_in_optimizer(sharded: ShardedModel, param_refs: Iterable[ParamRef]) -> States:
    """Return this rank's entries of parameters, as `optimizer.state` has them. Local."""
    state = {} if sharded.optimizer is None else sharded.optimizer.state
    return {p: flat_entries(state.get(owner_of(p), {})) for p in param_refs}


def _elements(value: Tensor, param_ref: ParamRef, span: Span) -> Tensor:
    """Return these elements of a whole entry, 1-D.

    `value` is what the optimizer has: only these elements where state is sharded, else all.
    """
    flat = value.detach().reshape(-1)
    return flat if param_ref.sharded.shards_state else flat[span.as_slice()]


@frozen(eq=False)
class LocalState:
    """This rank's optimizer state by parameter: in the optimizer, or with its offload. Local."""

    sharded: ShardedModel

    def describe(self, param_refs: Sequence[ParamRef]) -> States:
        """Return each parameter's entries, if any; offloaded tensors have shape and dtype only."""
        offload = self.sharded.residence.offload
        if offload is None:
            return self.read(param_refs)
        started = set(offload.started(besides=(MASTER,)))
        targets = _targets_of(param_refs)
        kept = states_in_optimizer(self.sharded, [p for p in param_refs if p not in targets])
        targets = {p: target for p, target in targets.items() if target in started}
        found = offload.describe(targets.values())
        entries = {p: flat_entries(found[target]) for p, target in targets.items()}
        # Masters of the partition's are values of parameters, and no entries.
        for param_ref, target in targets.items():
            if offload.hides_master(target):
                entries[param_ref].pop(MASTER, None)
        return {p: entries[p] if p in entries else kept.get(p, {}) for p in param_refs}

    def read(self, param_refs: Sequence[ParamRef], names: Collection[str] | None = None) -> States:
        """Return each parameter's entries: as they are in memory, or host copies of offloaded ones.

        Offloaded entries include masters, and only those of these names are read; all when None.
        """
        offload = self.sharded.residence.offload
        if offload is None:
            return states_in_optimizer(self.sharded, param_refs)
        targets = _targets_of(param_refs)
        keys = None if names is None else {keys_of_entry(name)[0] for name in names}
        found = offload.read(targets.values(), keys) if targets else {}
        kept = states_in_optimizer(self.sharded, [p for p in param_refs if p not in targets])
        return {p: flat_entries(found[targets[p]]) if p in targets else kept[p] for p in param_refs}

    def write(self, states: States) -> None:
        """Make these the states of their parameters; `EntryPart`s in them are read now."""
        offload = self.sharded.residence.offload
        if offload is not None:
            targets = _targets_of(states)
            self._write_offloaded(offload, {target: states[p] for p, target in targets.items()})
            states = {p: state for p, state in states.items() if p not in targets}
        group_of = {
            param: (member, group)
            for member in members_of(self.sharded.optimizer)
            for group in member.param_groups
            for param in group["params"]
        }
        # Reversed, as values are in `StateLoad.apply`.
        for param_ref, entries in reversed([*states.items()]):
            owner = owner_of(param_ref)
            if owner not in group_of:
                continue
            member, group = group_of[owner]
            live, state = flat_entries(member.state.get(owner, {})), {}
            for key, value in entries.items():
                device = owner.device if belongs_on_device(key, group) else None
                read = partial(EntryPart.read, there=live.get(key), device=device)
                whole = map_tensors(value, read, EntryPart)
                # Values that are no `EntryPart`, such as lists and objects, may contain tensors.
                if device is not None:
                    whole = map_tensors(whole, lambda tensor, to=device: tensor.to(to))
                state[key] = whole
            if state:
                member.state[owner] = nested_entries(state)
            else:
                member.state.pop(owner, None)

    def _write_offloaded(
        self, offload: OptimizerOffload, states: Mapping[nn.Parameter, Mapping[str, Any]]
    ) -> None:
        """Write states, by target, to the optimizer offload; see NOTE(batches).

        The first entries of a target that are written replace all that it had.
        """
        entries = [
            (target, key, state.get(key))
            for target, state in states.items()
            # One in no param group is not stepped.
            if self.sharded.residence.is_stepped(target)
            # The empty key stands for a state without entries, which is written, too.
            for key in state or ("",)
        ]
        started: set[nn.Parameter] = set()
        for batch in in_batches(
            entries,
            # Nothing small, nor entries of one dict, which are written together.
            lambda entry: 0 if entry[1].startswith("[") else getattr(entry[2], "num_bytes", 0),
            max_bytes=BATCH_BYTES,
        ):
            found: dict[nn.Parameter, dict[str, Any]] = {}
            for target, key, value in batch:
                state = found.setdefault(target, {})
                if key:
                    state[key] = map_tensors(value, EntryPart.read, EntryPart)
            nested = {target: nested_entries(state) for target, state in found.items()}
            first = {target: state for target, state in nested.items() if target not in started}
            if first:
                offload.mend()
                offload.write(first, replaces=True)
            if further := {t: state for t, state in nested.items() if t in started}:
                offload.write(further, replaces=False)
            started |= first.keys()


def _targets_of(param_refs: Iterable[ParamRef]) -> dict[ParamRef, nn.Parameter]:
    """Return the targets that an optimizer offload steps for them.

    Frozen parameters have none. They may have state, in the optimizer, of steps before.
    """
    return {
        param_ref: param_ref.buffer.offloaded_params[param_ref.position]
        for param_ref in param_refs
        if param_ref.buffer.offloaded_params
    }


def gather_state_info(
    states: Sequence[Mapping[str, Any]],
    *,
    group: Group,
    tag: int = 0,
    timeout_s: float | None = None,
) -> list[tuple[StateInfo, ...]]:
    """Return which entries each rank has, by parameter and by rank. Collective.

    `states` are this rank's, by parameter.
    """
    mine = [{key: asdict(EntryInfo.of(value)) for key, value in state.items()} for state in states]
    by_rank = all_gather_json(mine, group=group, tag=tag, timeout_s=timeout_s)
    # Every rank checks the keys of all ranks, so that all of them raise.
    for rank, of_rank in enumerate(by_rank):
        _check_keys(of_rank, f"rank {rank}")
    return [
        tuple({k: EntryInfo(**what) for k, what in state.items()} for state in of_param)
        for of_param in zip(*by_rank, strict=True)
    ]


def _check_keys(states: Iterable[Mapping[str, Any]], where: str) -> None:
    for name in chain.from_iterable(states):
        if is_strange(name):
            raise StateError(
                "optimizer state has entries of keys that are neither strings nor ints, "
                f"{name[2:]} for one ({where}), which have no name in a file or a message: it can "
                "be neither saved nor sent"
            )


def kept_spans(param_ref: ParamRef) -> tuple[Span | None, ...]:
    """Return the elements of a parameter that each rank keeps; None if there are none. Local."""
    layout = param_ref.buffer.plan.layout
    span = layout.spans[param_ref.position]
    overlaps = (span.overlap(shard) for shard in layout.shards)
    return tuple(None if part is None else part.shifted(-span.start) for part in overlaps)


def kept_as_json(param_ref: ParamRef) -> list[list[int] | None]:
    """Return the elements of a parameter whose state each rank has, in a form for JSON."""
    if not param_ref.sharded.shards_state:
        return [[0, param_ref.plan.shape.numel()]] * param_ref.group.world_size
    return [None if span is None else [span.start, span.stop] for span in kept_spans(param_ref)]


def gives_own(keeps: Sequence[list[int] | None], rank: int) -> bool:
    """Return whether a rank saves what it has of an entry without a whole: the first of equals."""
    return keeps[rank] is None or keeps.index(keeps[rank]) == rank


def plan_state(
    param_ref: ParamRef, infos: Sequence[StateInfo], *, has_own: bool = False
) -> dict[str, Entry]:
    """Return how each entry of a parameter's state is divided over the ranks. Local.

    `infos` are what the ranks say of their entries. An entry without a whole is each rank's own
    with `has_own`, and an error as of `plan_entry` otherwise.
    """
    keeps, entries = kept_spans(param_ref), dict[str, Entry]()
    for key in dict.fromkeys(key for of_rank in infos for key in of_rank):
        of_entry = [of.get(key) for of in infos]
        try:
            entries[key] = plan_entry(param_ref.plan, key, keeps, of_entry)
        except StateError:
            if not has_own or any(s is not None and s.described is None for s in of_entry):
                raise
            entries[key] = PerRankEntry(tuple(of_entry))
    return entries


def plan_states(
    sharded: ShardedModel, states: States, *, has_own: bool = False, timeout_s: float | None = None
) -> dict[ParamRef, dict[str, Entry]]:
    """Return how this rank's states are divided over the ranks. Collective where sharded.

    `states` are of the same parameters, in the same order, on every rank.
    """
    planned: dict[ParamRef, dict[str, Entry]] = {}
    if not sharded.shards_state:
        _check_keys(states.values(), f"rank {sharded.group.rank}")
        for param_ref, state in states.items():
            size = param_ref.group.world_size
            planned[param_ref] = {key: entry_on_each(v, size) for key, v in state.items()}
        return planned
    by_ranks: dict[str, list[ParamRef]] = {}
    for param_ref in states:
        by_ranks.setdefault(param_ref.buffer.plan.ranks, []).append(param_ref)
    for of_ranks in by_ranks.values():
        mine = [states[param_ref] for param_ref in of_ranks]
        infos = gather_state_info(mine, group=of_ranks[0].group, timeout_s=timeout_s)
        for param_ref, of_param in zip(of_ranks, infos, strict=True):
            planned[param_ref] = plan_state(param_ref, of_param, has_own=has_own)
    return planned


def entry_on_each(value: Any, world_size: int) -> Entry:
    """Return the plan of an entry that every rank has: each gives an equal run of its elements."""
    info = EntryInfo.of(value)
    if info.nest is not None and not is_plain(info.nest):
        return PerRankEntry((info,) * world_size, owner=0)
    if not isinstance(value, Tensor):
        return PlainEntry(value)
    ends = [value.numel() * rank // world_size for rank in range(world_size + 1)]
    spans = tuple(Span(start, stop) for start, stop in pairwise(ends))
    return TensorEntry(value.shape, value.dtype, info.is_on_host, spans)


def launch_entry(
    param_ref: ParamRef, key: str, entry: Entry, state: Mapping[str, Any]
) -> Callable[[], Any]:
    """Launch the gather of a whole entry from this rank's state. Collective.

    Returns:
        A function to call once. It waits, and returns the whole in memory of its own, on the host
        or the device, as the optimizer has the entry.
    """
    group, tag = param_ref.group, param_ref.sharded.access_tag
    if isinstance(entry, PerRankEntry):
        return _launch_nest(entry, state.get(key), group)
    if isinstance(entry, PlainEntry):
        return lambda: entry.value_beside(state.get(key))
    whole = torch.empty(entry.shape, dtype=entry.dtype, device=group.device)
    numel = entry.splits[group.rank]
    part: Tensor = state[key] if numel else whole.new_empty(0)
    splits = [count * entry.dtype.itemsize for count in entry.splits]
    # As bytes, since not every backend supports every dtype of state.
    handle = all_gather_flat(
        whole.view(-1).view(torch.uint8),
        splits=splits,
        group=group,
        shard=part.detach().to(group.device).contiguous().view(-1).view(torch.uint8),
        tag=tag,
    )

    def wait() -> Tensor:
        handle.wait()
        return whole.cpu() if entry.is_on_host else whole

    return wait


def _launch_nest(entry: PerRankEntry, own: Any, group: Group) -> Callable[[], Any]:
    """Launch the broadcasts of the tensors in a value that one rank has whole. Collective."""
    assert entry.owner is not None, "there is a whole"
    info = entry.infos[entry.owner]
    assert info is not None, "its owner has it"
    tensors: list[Tensor] = []
    if group.rank == entry.owner:
        describe(own, tensors)
    flat = [
        tensors[index].detach().to(group.device).reshape(-1).contiguous()
        if tensors
        else torch.empty(math.prod(shape), dtype=dtype, device=group.device)
        for index, (dtype, shape) in enumerate(described_tensors(info.nest))
    ]
    handles = [
        broadcast_flat(each.view(torch.uint8), src=entry.owner, group=group)
        for each in flat
        if each.numel()
    ]

    def wait() -> Any:
        for handle in handles:
            handle.wait()
        shapes = (shape for _, shape in described_tensors(info.nest))
        whole = (each.view(shape).clone() for each, shape in zip(flat, shapes, strict=True))
        return map_tensors(rebuild(info.nest, whole), lambda tensor: tensor)

    return wait


@frozen
class WholeTensor:
    """A tensor of the model or its optimizer, by names that no world size or stage changes."""

    # Name of the parameter.
    name: str
    # Entry of the optimizer's state; None: the values that are trained.
    entry: str | None
    shape: torch.Size
    dtype: torch.dtype
    # Division of a DTensor over the ranks of its mesh; None if it is not divided.
    split: Split | None = None

    @classmethod
    def of(
        cls, param_ref: ParamRef, entry: str | None, shape: torch.Size, dtype: torch.dtype
    ) -> Self:
        """Return what a tensor of a rank is, or is the part of. Local.

        Args:
            param_ref: The parameter.
            entry: Of its state; None for its values.
            shape: What the ranks have of it that have the same part of the parameter.
            dtype: Of it.
        """
        split = split_of(param_ref.param)
        if split is None or shape != param_ref.plan.shape:
            return cls(param_ref.saved_name, entry, shape, dtype)
        return cls(param_ref.saved_name, entry, split.shape, dtype, split)

    def given_part(self, param_ref: ParamRef, span: Span) -> Part:
        """Return what a rank gives that has these elements of its parameter; maybe no elements."""
        if self.split is not None:
            span = span.shifted(self.split.span_of(part_index(param_ref.param)).start)
        elif not param_ref.sharded.routes.is_first_part:
            span = Span(0, 0)
        return Part(self, span)


@frozen
class Part:
    """A run of a tensor's flattened elements; of a split tensor's, in the order of the parts."""

    tensor: WholeTensor
    span: Span

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.span.numel * self.tensor.dtype.itemsize


@frozen(eq=False)
class PartBatch:
    """Parts that are read together."""

    parts: tuple[Part, ...]
    # Whether these are parts of parameters that do not train.
    is_frozen: bool
    # Returns a 1-D tensor for each part, in order; only for reading, and until the next step.
    read: Callable[[], list[Tensor]]
    # Whether `read` returns the memory that is trained itself; see `before_write`.
    is_resident: bool


@define(eq=False)
class StateParts:
    """Tensors of a partitioned model and its optimizer, and this rank's parts of them."""

    # Names of parameters that do not train.
    frozen: frozenset[str]
    # Further name of a tied parameter -> its first name.
    ties: Mapping[str, str]
    # In the same order on every rank.
    tensors: list[WholeTensor] = field(factory=list)
    # Parameter -> entry -> value that is no tensor.
    values: dict[str, dict[str, Any]] = field(factory=dict)
    batches: list[PartBatch] = field(factory=list)
    # Parameter -> description of entries without a whole; see NOTE(own).
    own_said: dict[str, Any] = field(factory=dict)
    # Tensors of such entries that this rank gives; only for reading, and until the next step.
    own: list[Tensor] = field(factory=list)
    # Parameter -> dtype that the model computes in, where values have another.
    computes_in: dict[str, torch.dtype] = field(factory=dict)
    # Problems with state that only some ranks have.
    problems: list[str] = field(factory=list)
    # For each optimizer: its state that belongs to no parameter.
    shared: Sequence[Mapping[Any, Any]] = ()
    # For each optimizer: further entries of its state dict; see `extra_entries`.
    extra: Sequence[Mapping[str, Any]] = ()

    def say_own(self, param_ref: ParamRef, key: str, entry: PerRankEntry) -> bool:
        """Say what each rank has of an entry without a whole; returns whether this one gives its.

        Raises:
            StateError: The parameter is split.
        """
        problem = (
            f"optimizer state {key!r} of {param_ref.name!r}, which not all ranks have: it cannot "
            "be put together, as its layout is not known. Save without the optimizer, or use one "
            "whose state has the parameter's shape"
        )
        if split_of(param_ref.param) is not None:
            raise StateError(problem)
        if param_ref.buffer.plan.ranks:
            self.problems.append(problem)
            return False
        own = {"keeps": kept_as_json(param_ref), "entries": {}}
        of_param = self.own_said.setdefault(param_ref.name, own)
        of_param["entries"][key] = [info and info.described for info in entry.infos]
        return (
            gives_own(own["keeps"], param_ref.group.rank) and param_ref.sharded.routes.is_first_part
        )


def plan_parts(
    sharded: ShardedModel, *, has_state: bool, has_frozen: bool = True, timeout_s: float = 60.0
) -> StateParts:
    """Plan which part each rank gives, so that every element is given once.

    Collective where state is sharded. Values are read later, by `PartBatch.read`; only entries
    without a whole are read now.

    Args:
        sharded: The model.
        has_state: Whether the optimizer's state is asked for as well.
        has_frozen: Whether parameters that do not train are.
        timeout_s: How long to wait for ranks that do not call this.

    Raises:
        StateError: An entry without a whole contains values that would have to be pickled.
        zero_comm.CommError: A rank did not take part in time.
    """
    param_refs = [
        param_ref for param_ref in sharded.param_refs if has_frozen or param_ref.is_trainable
    ]
    for buffer in dict.fromkeys(param_ref.buffer for param_ref in param_refs):
        buffer.follow_writes()
    local = LocalState(sharded)
    states: States = local.describe(param_refs) if has_state else {}
    entries = plan_states(sharded, states, has_own=True, timeout_s=timeout_s)
    parts = StateParts(
        frozen=frozenset(
            param_ref.saved_name for param_ref in param_refs if not param_ref.is_trainable
        ),
        ties={
            alias + param_ref.saved_name.removeprefix(param_ref.name): param_ref.saved_name
            for param_ref in param_refs
            for alias in param_ref.plan.names[1:]
        },
        shared=[shared_state(o) for o in members_of(sharded.optimizer)] if has_state else (),
        extra=[extra_entries(o) for o in members_of(sharded.optimizer)] if has_state else (),
    )
    sources: dict[Part, tuple[ParamRef, Span]] = {}
    for param_ref in param_refs:
        name, buffer, planned = param_ref.saved_name, param_ref.buffer, entries.get(param_ref, {})
        # A master that the optimizer keeps by itself.
        master = planned.pop(MASTER, None)
        dtype = master.dtype if isinstance(master, TensorEntry) else buffer.main_shard.dtype
        if dtype != buffer.plan.dtype:
            parts.computes_in[name] = buffer.plan.dtype
        spans = {WholeTensor.of(param_ref, None, param_ref.plan.shape, dtype): param_ref.kept}
        for key, entry in planned.items():
            if isinstance(entry, PlainEntry):
                value = entry.value_beside(states[param_ref].get(key))
                parts.values.setdefault(name, {})[key] = value
            elif isinstance(entry, PerRankEntry):
                if parts.say_own(param_ref, key, entry):
                    describe(local.read([param_ref])[param_ref].get(key), parts.own)
            else:
                tensor = WholeTensor.of(param_ref, key, entry.shape, entry.dtype)
                spans[tensor] = entry.given_by(param_ref.group.rank)
        parts.tensors.extend(spans)
        given = {t.given_part(param_ref, span): (param_ref, span) for t, span in spans.items()}
        sources |= {part: source for part, source in given.items() if part.span.numel}
    for is_frozen in (True, False):
        mine = [item for item in sources.items() if item[1][0].is_trainable is not is_frozen]
        batches = in_batches(mine, lambda item: item[0].num_bytes, max_bytes=BATCH_BYTES)
        for batch in map(dict, batches):
            is_resident = sharded.residence.offload is None and all(
                part.tensor.entry or param_ref.buffer.main_shard.memory is not None
                for part, (param_ref, _) in batch.items()
            )
            read = partial(_read, local, batch)
            parts.batches.append(PartBatch(tuple(batch), is_frozen, read, is_resident))
    return parts


def _read(local: LocalState, batch: Mapping[Part, tuple[ParamRef, Span]]) -> list[Tensor]:
    inside = {part: key for part, (at, _) in batch.items() if (key := _key_in_state(part, at))}
    owners = list(dict.fromkeys(batch[part][0] for part in inside))
    states = local.read(owners, {*inside.values()})
    model_shard: dict[FlatBuffer, Tensor] = {}
    values = []
    for part, (param_ref, span) in batch.items():
        key, state, buffer = inside.get(part, ""), states.get(param_ref, {}), param_ref.buffer
        if key in state:
            values.append(_elements(state[key], param_ref, span))
        elif buffer.main_shard.memory is not None:
            values.append(part_of(param_ref, buffer.main_shard.memory))
        else:
            # Not stepped yet: the master equals the shard.
            if buffer not in model_shard:
                model_shard[buffer] = buffer.model_shard.read()
            values.append(part_of(param_ref, model_shard[buffer]).to(part.tensor.dtype))
    return values


def _key_in_state(part: Part, param_ref: ParamRef) -> str | None:
    """Return the entry of this rank's state that has a part; None if the flat buffer has it."""
    main_shard, offloaded_params = param_ref.buffer.main_shard, param_ref.buffer.offloaded_params
    is_master = part.tensor.dtype != main_shard.dtype or (
        main_shard.memory is None and offloaded_params
    )
    return part.tensor.entry or (MASTER if is_master else None)
