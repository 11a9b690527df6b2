"""Where a rank keeps what is read of values and optimizer state: found first, and written then."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from ._chained import members_of
from ._cut import Cut
from ._flat_buffer import FlatBuffer
from ._nested_state import map_tensors
from ._placement import Placement
from ._range_reader import AbstractRangeReader
from ._sharded_model import ShardedModel
from ._span import Span
from ._state_entry import part_in_entry, part_of_entry
from ._updater import MASTER, AbstractUpdater

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


def fill_buffer(buffer: FlatBuffer, readers: Readers, updater: AbstractUpdater | None) -> None:
    """Read parameters to where they rest on this rank; masters are what is read, unrounded. Local.

    Beside what rests, there is one shard in memory where values rest elsewhere.
    """
    if updater is not None and buffer.targets and buffer.training.memory is not None:
        _fill_own_masters(buffer, readers, updater)
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
        if updater is not None and buffer.targets and rest.dtype == buffer.plan.dtype:
            _fill_own_masters(buffer, readers, updater)
    if buffer.has_masters and (buffer.whole is None or buffer.codec is not None):
        buffer.resting.write(values)


def _fill_own_masters(buffer: FlatBuffer, readers: Readers, updater: AbstractUpdater) -> None:
    """Those that an updater keeps of its own accord, of parameters of 16 bits."""
    for piece in buffer.pieces:
        reader, target = readers.get(piece.index), buffer.targets[piece.index]
        if reader is None or not target.dtype.is_floating_point or target.dtype.itemsize >= 4:
            continue
        values = torch.empty(piece.in_tensor.numel, dtype=torch.float32)
        read_into(values, reader, piece.in_tensor)
        updater.write({target: {MASTER: values}}, replaces=False)


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
    if sharded.residence.updater is not None:
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
    updater = sharded.residence.updater
    assert updater is not None, "asked before"
    begun: set[nn.Parameter] = set()
    for batch in _batches(targets):
        states: dict[bool, dict[nn.Parameter, dict[str, Any]]] = {True: {}, False: {}}
        for target, key in batch:
            if not target.buffer.targets:  # frozen, though in a param group
                continue
            param = target.buffer.targets[target.position]
            if not sharded.residence.is_updated(param):
                continue
            is_first = param not in begun or param in states[True]
            begun.add(param)
            state = states[is_first].setdefault(param, {})
            if key is not None:
                state[key] = map_tensors(target.entries[key], _on_host, EntryPart)
        for replaces, chosen in states.items():
            if chosen:
                updater.write(chosen, replaces=replaces)


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
