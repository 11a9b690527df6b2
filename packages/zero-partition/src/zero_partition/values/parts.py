"""What each rank gives of a model and its optimizer, so that all together give it once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeAlias

import torch
from attrs import frozen
from torch import Tensor, nn

from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.memory.seams import MASTER
from zero_partition.nested import describe
from zero_partition.optimizer.entries import (
    Entry,
    OwnEntry,
    PlainEntry,
    Said,
    TensorEntry,
    ask_states,
    keeps_of,
    plan_state,
    spans_said,
)
from zero_partition.plan.layout import Span
from zero_partition.plan.stages import Placement
from zero_partition.run.sharded_model import ShardedModel

BATCH_BYTES: Final = 16 * 2**20  # read together where state rests elsewhere

# NOTE(own): entries without a whole go on at the same world size and layout, where each rank gets
# back what it had. Of each parameter with some it is said which elements the ranks keep, and what
# each rank has, as `describe` says it; the tensors in that are given in order, by their own rank.

# NOTE(batches): what rests outside the device is read to be given, a whole sub-group at a time,
# whoever asks for how little. So parts are read in batches; a larger part is a batch of its own.


@frozen
class WholeTensor:
    """A tensor of the model or its optimizer, by names that no world size or stage changes."""

    name: str  # of the parameter
    entry: str | None  # of the optimizer's state; None: the values that are trained
    shape: torch.Size
    dtype: torch.dtype


@frozen
class Part:
    """A run of its flattened elements."""

    tensor: WholeTensor
    span: Span

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return self.span.numel * self.tensor.dtype.itemsize


@frozen(eq=False)
class PartBatch:
    """Parts that are read together."""

    parts: tuple[Part, ...]
    is_frozen: bool  # of parameters that do not train
    read: Callable[[], list[Tensor]]  # each 1-D, in order, to look at until the next step
    is_resident: bool  # what is read is the memory that is trained itself; see `before_write`


@frozen(eq=False)
class StateParts:
    """All tensors of a partitioned model and its optimizer, and this rank's parts of them."""

    tensors: tuple[WholeTensor, ...]  # in the same order on every rank
    values: Mapping[str, Mapping[str, Any]]  # by parameter: entries that are no tensors
    batches: tuple[PartBatch, ...]
    own_said: Mapping[str, Any]  # of entries without a whole, as JSON; see NOTE(own)
    own: Sequence[Tensor]  # this rank's tensors of those, in order, to look at as those of batches
    frozen: frozenset[str]  # names of parameters that do not train
    computes_in: Mapping[str, torch.dtype]  # of parameters whose trained values are of another
    ties: Mapping[str, str]  # further names of tied parameters, to the first


@frozen(eq=False)
class _Item:
    """A part, and where it is read."""

    part: Part
    buffer: FlatBuffer
    position: int


Entries: TypeAlias = list[list[dict[str, Entry]]]  # by buffer and position


def plan_parts(
    sharded: ShardedModel, *, has_state: bool, has_frozen: bool = True, timeout_s: float = 60.0
) -> StateParts:
    """Say who gives what. Collective where optimizer state is sharded; reads nothing.

    Args:
        sharded: The model.
        has_state: Whether the optimizer's state is asked for as well.
        has_frozen: Whether parameters that do not train are.
        timeout_s: How long to wait for ranks that do not call this.

    Raises:
        StateError: An entry without a whole holds what would have to be pickled.
        zero_comm.CommError: A rank did not take part in time.
    """
    buffers = [
        buffer
        for unit in sharded.units
        for buffer in unit.buffers
        if has_frozen or buffer.plan.trainable
    ]
    for buffer in buffers:
        buffer.follow_writes()
    states = states_of(sharded, buffers) if has_state else []
    entries = plan_entries(sharded, buffers, states, timeout_s, has_own=True) if has_state else None
    own_said: dict[str, dict[str, Any]] = {}
    own_tensors: list[Tensor] = []
    tensors: list[WholeTensor] = []
    values: dict[str, dict[str, Any]] = {}
    items: list[_Item] = []
    computes_in: dict[str, torch.dtype] = {}
    for index, buffer in enumerate(buffers):
        for position, param in enumerate(buffer.plan.params):
            planned = dict(entries[index][position]) if entries is not None else {}
            master = planned.pop(MASTER, None)  # that is kept without our asking
            dtype = master.dtype if isinstance(master, TensorEntry) else buffer.training.dtype
            if dtype != buffer.plan.dtype:
                computes_in[param.name] = buffer.plan.dtype
            own = WholeTensor(param.name, None, param.shape, dtype)
            piece = buffer.piece_of(position)
            spans = {own: Span(0, 0) if piece is None else piece.in_tensor}
            for key, entry in planned.items():
                if isinstance(entry, PlainEntry):
                    mine = states[index][position].get(key, entry.value)
                    values.setdefault(param.name, {})[key] = mine
                    continue
                if isinstance(entry, OwnEntry):
                    keeps = spans_said(keeps_of(buffer, position))
                    of_param = own_said.setdefault(param.name, {"keeps": keeps, "entries": {}})
                    of_param["entries"][key] = [said and said.described for said in entry.said]
                    state = states_of(sharded, [buffer], is_read=True)[0][position]
                    describe(state.get(key), own_tensors)
                    continue
                tensor = WholeTensor(param.name, key, entry.shape, entry.dtype)
                spans[tensor] = entry.given_by(sharded.group.rank)
            tensors += spans
            items += [
                _Item(Part(tensor, span), buffer, position)
                for tensor, span in spans.items()
                if span.numel
            ]
    plans = [param for buffer in buffers for param in buffer.plan.params]
    return StateParts(
        tuple(tensors),
        values,
        tuple(
            PartBatch(
                tuple(item.part for item in batch),
                is_frozen,
                partial(_read, sharded, batch),
                sharded.residence.offload is None and all(map(_lies_in_memory, batch)),
            )
            for is_frozen in (True, False)
            for batch in _batches(i for i in items if i.buffer.plan.trainable is not is_frozen)
        ),
        own_said=own_said,
        own=own_tensors,
        frozen=frozenset(param.name for param in plans if not param.trainable),
        computes_in=computes_in,
        ties={alias: param.name for param in plans for alias in param.names[1:]},
    )


def states_of(
    sharded: ShardedModel, buffers: Iterable[FlatBuffer], *, is_read: bool = False
) -> list[list[Mapping[str, Any]]]:
    """This rank's state of each parameter, by buffer. Local. Empty where there is none.

    Args:
        sharded: The model.
        buffers: Of which parameters.
        is_read: Whether what rests elsewhere is read, into host memory; else it has shapes only.
    """
    offload = sharded.residence.offload
    if offload is not None:
        targets = [target for buffer in buffers for target in buffer.targets]
        if is_read:
            found = offload.read(targets)
        else:
            started = set(offload.started(besides=(MASTER,)))
            found = offload.describe(target for target in targets if target in started)
        return [
            [_visible(buffer, found.get(target, {})) for target in buffer.targets]
            if buffer.targets
            else [{} for _ in buffer.params]
            for buffer in buffers
        ]
    state = {} if sharded.optimizer is None else sharded.optimizer.state
    is_sharded = sharded.placements.optim is Placement.SHARDED
    return [
        [state.get(p, {}) for p in (buffer.shard_params if is_sharded else buffer.params)]
        for buffer in buffers
    ]


def plan_entries(
    sharded: ShardedModel,
    buffers: Sequence[FlatBuffer],
    states: Sequence[Sequence[Mapping[str, Any]]],
    timeout_s: float,
    *,
    has_own: bool = False,
) -> Entries:
    """How all optimizer state lies over the ranks, by buffer, position and entry. Collective.

    Args:
        sharded: The model.
        buffers: Of it.
        states: Of them, as `states_of` gives it.
        timeout_s: How long to wait for other ranks.
        has_own: See `plan_state`.
    """
    group = sharded.group
    if sharded.placements.optim is Placement.REPLICATED:
        return [
            [{k: _shared_out(v, group.world_size) for k, v in one.items()} for one in of]
            for of in states
        ]
    flat = [state for of_buffer in states for state in of_buffer]
    by_param = iter(zip(*ask_states(flat, group=group, timeout_s=timeout_s), strict=True))
    return [
        [
            plan_state(buffer, position, next(by_param), has_own=has_own)
            for position in range(len(buffer.params))
        ]
        for buffer in buffers
    ]


def _shared_out(value: Any, world_size: int) -> Entry:
    """An entry that every rank has: each gives an equal run of its elements."""
    said = Said.of(value)
    if not isinstance(value, Tensor):
        return PlainEntry(value)
    ends = [value.numel() * rank // world_size for rank in range(world_size + 1)]
    spans = tuple(Span(start, stop) for start, stop in pairwise(ends))
    return TensorEntry(value.shape, value.dtype, said.is_on_host, spans)


def _batches(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    """See NOTE(batches)."""
    batch: list[_Item] = []
    num_bytes = 0
    for item in items:
        if batch and num_bytes + item.part.num_bytes > BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += item.part.num_bytes
    if batch:
        yield batch


def _read(sharded: ShardedModel, batch: Sequence[_Item]) -> list[Tensor]:
    elsewhere: dict[nn.Parameter, dict[str, Any]] = {}
    offload = sharded.residence.offload
    if offload is not None:
        names = {item.part.tensor.entry or MASTER for item in batch}
        targets = {
            item.buffer.targets[item.position]: None
            for item in batch
            if item.buffer.targets and _rests_elsewhere(item)
        }
        elsewhere = offload.read(targets, names) if targets else {}
    state = {} if sharded.optimizer is None else sharded.optimizer.state
    resting: dict[int, Tensor] = {}
    found = []
    for item in batch:
        is_param = item.part.tensor.entry is None
        own = None
        if is_param and _rests_elsewhere(item):
            own = _own_master(sharded, item.buffer, item.position, item.part.span)
        found.append(_find(item, state, elsewhere, resting) if own is None else own)
    return found


def _lies_in_memory(item: _Item) -> bool:
    return item.part.tensor.entry is not None or item.buffer.training.memory is not None


def _rests_elsewhere(item: _Item) -> bool:
    tensor, training = item.part.tensor, item.buffer.training
    return tensor.entry is not None or training.memory is None or tensor.dtype != training.dtype


def _find(
    item: _Item,
    state: Mapping[Any, Mapping[str, Any]],
    elsewhere: Mapping[nn.Parameter, Mapping[str, Any]],
    resting: dict[int, Tensor],
) -> Tensor:
    buffer, key = item.buffer, item.part.tensor.entry
    found = elsewhere.get(buffer.targets[item.position], {}) if buffer.targets else {}
    if (key or MASTER) in found and _rests_elsewhere(item):
        return found[key or MASTER].reshape(-1)
    if key is None:
        piece = buffer.piece_of(item.position)
        assert piece is not None, "a rank that keeps nothing gives nothing"
        values = buffer.training.memory
        if values is None:  # not stepped yet: the master is what the shard is
            if buffer.index not in resting:
                resting[buffer.index] = buffer.resting.read()
            values = resting[buffer.index].to(item.part.tensor.dtype)
        return values[piece.in_shard.as_slice()]
    shard, span = buffer.shard_params[item.position], item.part.span
    if shard in state:
        return state[shard][key].detach().reshape(-1)
    return state[buffer.params[item.position]][key].detach().reshape(-1)[span.as_slice()]


def own_masters_of(sharded: ShardedModel, buffer: FlatBuffer) -> bool:
    """Whether the optimizer keeps masters of these parameters of its own accord, and says so."""
    dtype, optimizer = buffer.training.dtype, sharded.optimizer
    is_narrow = dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
    is_asked = sharded.residence.offload is None and buffer.plan.trainable
    return is_narrow and is_asked and bool(getattr(optimizer, "keeps_masters", False))


def _own_master(
    sharded: ShardedModel, buffer: FlatBuffer, position: int, span: Span
) -> Tensor | None:
    """That the optimizer keeps beside its moments; None if it has none yet."""
    if sharded.optimizer is None or not own_masters_of(sharded, buffer):
        return None
    is_whole = sharded.placements.optim is Placement.REPLICATED
    holder = (buffer.params if is_whole else buffer.shard_params)[position]
    state = sharded.optimizer.state
    if holder not in state or MASTER not in state[holder]:
        return None
    master = state[holder][MASTER].detach().reshape(-1)
    return master[span.as_slice()] if is_whole else master


def trained_of(sharded: ShardedModel, buffer: FlatBuffer) -> Tensor:
    """This rank's values as they are updated, to look at, 1-D: masters where there are some. Local.

    Also those that the optimizer keeps of its own accord.
    """
    buffer.follow_writes()
    if not own_masters_of(sharded, buffer):
        return buffer.trained
    values = buffer.trained.to(torch.float32)
    for piece in buffer.pieces:
        master = _own_master(sharded, buffer, piece.index, piece.in_tensor)
        if master is not None:
            values[piece.in_shard.as_slice()].copy_(master)
    return values


def _visible(buffer: FlatBuffer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Masters of the partition's are values of parameters, and no entries.

    One that the optimizer keeps of its own accord, of a 16-bit parameter, is of another dtype.
    """
    training = buffer.training

    def is_own(value: Any) -> bool:
        return training.memory is not None or value.dtype != training.dtype

    return {name: value for name, value in state.items() if name != MASTER or is_own(value)}
