"""Which ranks' memory holds which elements of a value, by name: parameters and their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from attrs import asdict
from torch import Tensor, nn
from zero_comm import Group, all_gather_flat, all_gather_json

from zero_partition.errors import StateError
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.memory.seams import MASTER
from zero_partition.optimizer.entries import (
    Entry,
    OwnEntry,
    PlainEntry,
    Said,
    TensorEntry,
    plan_entry,
)
from zero_partition.plan.layout import Span
from zero_partition.run.sharded_model import (
    ParamRef,
    ShardedModel,
    find_place,
    part_of,
)


def places_in(buffer: FlatBuffer) -> list[ParamRef]:
    """Those of its parameters, in order."""
    return [place for param in buffer.params if (place := find_place(param)) is not None]


def trained_of(sharded: ShardedModel, buffer: FlatBuffer) -> Tensor:
    """This rank's values as they are updated, to look at, 1-D: masters where there are some. Local.

    Also those that the optimizer keeps of its own accord.
    """
    buffer.follow_writes()
    if not keeps_own_masters(sharded, buffer):
        return buffer.trained
    values = buffer.trained.to(torch.float32)
    for place in places_in(buffer):
        if (master := own_master(place)) is not None:
            part_of(place, values).copy_(master)
    return values


def keeps_own_masters(sharded: ShardedModel, buffer: FlatBuffer) -> bool:
    """Whether the optimizer keeps masters of these parameters of its own accord, and says so."""
    dtype = buffer.training.dtype
    is_narrow = dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
    is_asked = sharded.residence.offload is None and buffer.plan.trainable
    return is_narrow and is_asked and bool(getattr(sharded.optimizer, "keeps_masters", False))


def own_master(place: ParamRef) -> Tensor | None:
    """This rank's part of what the optimizer keeps beside its moments; None if it has none."""
    sharded = place.sharded
    if sharded.optimizer is None or not keeps_own_masters(sharded, place.buffer):
        return None
    state, owner = sharded.optimizer.state, owner_of(place)
    if owner not in state or MASTER not in state[owner]:
        return None
    master = state[owner][MASTER].detach().reshape(-1)
    return master if sharded.shards_state else master[place.kept.as_slice()]


SaidOfState: TypeAlias = dict[str, Said]  # by entry


def owner_of(place: ParamRef) -> nn.Parameter:
    """What the optimizer has of a parameter: its shard, or itself where it rests whole."""
    buffer = place.buffer
    return (buffer.shard_params if place.sharded.shards_state else buffer.params)[place.position]


def target_of(place: ParamRef) -> nn.Parameter | None:
    """What an optimizer offload steps of it; None where none does."""
    return place.buffer.targets[place.position] if place.buffer.targets else None


def states_of(
    sharded: ShardedModel, places: Sequence[ParamRef], *, is_read: bool = False
) -> list[Mapping[str, Any]]:
    """This rank's state of each parameter, empty where there is none. Local.

    What rests elsewhere has shapes only, or `is_read` into host memory.
    """
    offload = sharded.residence.offload
    if offload is None:
        state = {} if sharded.optimizer is None else sharded.optimizer.state
        return [state.get(owner_of(place), {}) for place in places]
    targets = [target_of(place) for place in places]
    stepped = [target for target in targets if target is not None]
    if is_read:
        found = offload.read(stepped)
    else:
        started = set(offload.started(besides=(MASTER,)))
        found = offload.describe(target for target in stepped if target in started)
    # Masters of the partition's are values of parameters, and no entries.
    return [
        {k: v for k, v in found[t].items() if k != MASTER or not offload.hides_master(t)}
        if t is not None and t in found
        else {}
        for t in targets
    ]


def ask_states(
    states: Sequence[Mapping[str, Any]],
    *,
    group: Group,
    tag: int = 0,
    timeout_s: float | None = None,
) -> list[tuple[SaidOfState, ...]]:
    """Which entries the ranks have, by parameter and by rank, if this one has these. Collective."""
    mine = [{key: asdict(Said.of(value)) for key, value in state.items()} for state in states]
    by_rank = all_gather_json(mine, group=group, tag=tag, timeout_s=timeout_s)
    return [
        tuple({k: Said(**what) for k, what in state.items()} for state in of_param)
        for of_param in zip(*by_rank, strict=True)
    ]


def keeps_of(place: ParamRef) -> tuple[Span | None, ...]:
    """By rank, the elements of a parameter that it keeps; None if there are none. Local."""
    layout = place.buffer.plan.layout
    span = layout.spans[place.position]
    overlaps = (span.overlap(shard) for shard in layout.shards)
    return tuple(None if part is None else part.shifted(-span.start) for part in overlaps)


def keeps_said(place: ParamRef) -> list[list[int] | None]:
    """The same as JSON can say it."""
    return [None if span is None else [span.start, span.stop] for span in keeps_of(place)]


def plan_state(
    place: ParamRef, said: Sequence[SaidOfState], *, has_own: bool = False
) -> dict[str, Entry]:
    """How each entry of a parameter's state lies over the ranks, by what these say. Local.

    An entry without a whole is each rank's own if it `has_own`, else an error as of `plan_entry`.
    """
    keeps, entries = keeps_of(place), dict[str, Entry]()
    for key in dict.fromkeys(key for of_rank in said for key in of_rank):
        of_entry = [of.get(key) for of in said]
        try:
            entries[key] = plan_entry(place.plan, key, keeps, of_entry)
        except StateError:
            if not has_own or any(s is not None and s.described is None for s in of_entry):
                raise
            entries[key] = OwnEntry(tuple(of_entry))
    return entries


def entry_on_each(value: Any, world_size: int) -> Entry:
    """An entry that every rank has: each gives an equal run of its elements."""
    said = Said.of(value)
    if not isinstance(value, Tensor):
        return PlainEntry(value)
    ends = [value.numel() * rank // world_size for rank in range(world_size + 1)]
    spans = tuple(Span(start, stop) for start, stop in pairwise(ends))
    return TensorEntry(value.shape, value.dtype, said.is_on_host, spans)


def launch_entry(
    entry: Entry, state: Mapping[str, Any], key: str, *, group: Group, tag: int = 0
) -> Callable[[], Any]:
    """Launch the gather of a whole entry from this rank's state. Collective.

    Returns:
        Call it once to wait; gives the whole, memory of its own, where the optimizer has it (host
        or device).
    """
    assert not isinstance(entry, OwnEntry), "there is no whole"
    if isinstance(entry, PlainEntry):
        return lambda: state.get(key, entry.value)
    whole = torch.empty(entry.shape, dtype=entry.dtype, device=group.device)
    numel = entry.splits[group.rank]
    part: Tensor = state[key] if numel else whole.new_empty(0)
    splits = [count * entry.dtype.itemsize for count in entry.splits]
    handle = all_gather_flat(  # as bytes: not every backend knows every dtype of state
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
