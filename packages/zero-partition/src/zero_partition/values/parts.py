"""What each rank gives of a model and its optimizer, so that all together give it once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

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
    TensorEntry,
)
from zero_partition.plan.layout import Span
from zero_partition.run.sharded_model import ParamRef, ShardedModel, part_of

from .runs import (
    ask_states,
    entry_on_each,
    keeps_said,
    own_master,
    owner_of,
    plan_state,
    states_of,
    target_of,
)

T = TypeVar("T")

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
    places = [place for place in sharded.places if has_frozen or place.is_trainable]
    for buffer in dict.fromkeys(place.buffer for place in places):
        buffer.follow_writes()
    states: Sequence[Mapping[str, Any]] = [{} for _ in places]
    entries: list[dict[str, Entry]] = [{} for _ in places]
    if has_state:
        states = states_of(sharded, places)
        entries = _plan_entries(sharded, places, states, timeout_s)
    own_said: dict[str, dict[str, Any]] = {}
    own_tensors: list[Tensor] = []
    tensors: list[WholeTensor] = []
    values: dict[str, dict[str, Any]] = {}
    places_of: dict[Part, ParamRef] = {}
    computes_in: dict[str, torch.dtype] = {}
    for place, state, planned in zip(places, states, entries, strict=True):
        name, shape, own_dtype = place.name, place.plan.shape, place.buffer.plan.dtype
        master = planned.pop(MASTER, None)  # that is kept without our asking
        dtype = master.dtype if isinstance(master, TensorEntry) else place.buffer.training.dtype
        if dtype != own_dtype:
            computes_in[name] = own_dtype
        spans = {WholeTensor(name, None, shape, dtype): place.kept}
        for key, entry in planned.items():
            if isinstance(entry, PlainEntry):
                values.setdefault(name, {})[key] = state.get(key, entry.value)
            elif isinstance(entry, OwnEntry):
                of_param = own_said.setdefault(name, {"keeps": keeps_said(place), "entries": {}})
                of_param["entries"][key] = [said and said.described for said in entry.said]
                describe(states_of(sharded, [place], is_read=True)[0].get(key), own_tensors)
            else:
                tensor = WholeTensor(name, key, entry.shape, entry.dtype)
                spans[tensor] = entry.given_by(sharded.group.rank)
        tensors += spans
        places_of |= {Part(tensor, span): place for tensor, span in spans.items() if span.numel}
    batches = []
    for is_frozen in (True, False):
        mine = [item for item in places_of.items() if item[1].is_trainable is not is_frozen]
        for batch in map(dict, in_batches(mine, lambda item: item[0].num_bytes)):
            is_resident = all(_lies_in_memory(part, place) for part, place in batch.items())
            is_resident = is_resident and sharded.residence.offload is None
            read = partial(_read, sharded, batch)
            batches.append(PartBatch(tuple(batch), is_frozen, read, is_resident))
    return StateParts(
        tuple(tensors),
        values,
        tuple(batches),
        own_said=own_said,
        own=own_tensors,
        frozen=frozenset(place.name for place in places if not place.is_trainable),
        computes_in=computes_in,
        ties={alias: place.name for place in places for alias in place.plan.names[1:]},
    )


def _plan_entries(
    sharded: ShardedModel,
    places: Sequence[ParamRef],
    states: Sequence[Mapping[str, Any]],
    timeout_s: float,
) -> list[dict[str, Entry]]:
    """How all optimizer state lies over the ranks. Collective where it is sharded."""
    group = sharded.group
    if not sharded.shards_state:
        return [{k: entry_on_each(v, group.world_size) for k, v in of.items()} for of in states]
    said = ask_states(states, group=group, timeout_s=timeout_s)
    return [plan_state(place, of, has_own=True) for place, of in zip(places, said, strict=True)]


def in_batches(items: Iterable[T], bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """See NOTE(batches)."""
    batch: list[T] = []
    num_bytes = 0
    for item in items:
        if batch and num_bytes + bytes_of(item) > BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += bytes_of(item)
    if batch:
        yield batch


def _lies_in_memory(part: Part, place: ParamRef) -> bool:
    return part.tensor.entry is not None or place.buffer.training.memory is not None


def _rests_elsewhere(part: Part, place: ParamRef) -> bool:
    is_other = part.tensor.dtype != place.buffer.training.dtype
    return part.tensor.entry is not None or not _lies_in_memory(part, place) or is_other


def _read(sharded: ShardedModel, batch: Mapping[Part, ParamRef]) -> list[Tensor]:
    offload = sharded.residence.offload
    found: dict[nn.Parameter, dict[str, Any]] = {}
    resting: dict[FlatBuffer, Tensor] = {}
    elsewhere = {
        part: target_of(place) for part, place in batch.items() if _rests_elsewhere(part, place)
    }
    targets = {target: None for target in elsewhere.values() if target is not None}
    if offload is not None and targets:
        found = offload.read(targets, {part.tensor.entry or MASTER for part in batch})

    def read(part: Part, place: ParamRef) -> Tensor:
        key = part.tensor.entry
        state = found.get(elsewhere.get(part), {})  # type: ignore[arg-type]
        if (key or MASTER) in state:
            return state[key or MASTER].reshape(-1)
        if key is not None:
            assert sharded.optimizer is not None, "whose state it is"
            values = sharded.optimizer.state[owner_of(place)][key].detach().reshape(-1)
            return values if sharded.shards_state else values[part.span.as_slice()]
        if part in elsewhere and (master := own_master(place)) is not None:
            return master
        if (memory := place.buffer.training.memory) is not None:
            return part_of(place, memory)
        if place.buffer not in resting:  # not stepped yet: the master is what the shard is
            resting[place.buffer] = place.buffer.resting.read()
        return part_of(place, resting[place.buffer]).to(part.tensor.dtype)

    return [read(part, place) for part, place in batch.items()]
