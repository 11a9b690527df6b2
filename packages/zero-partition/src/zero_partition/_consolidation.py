"""The whole state of an optimizer whose ranks have a part of the parameters each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor
from zero_comm import Group, all_gather_flat, all_gather_json, gather_flat

from ._errors import StateError
from ._nested_state import describe, rebuild, tensors_said
from ._parcel import Parcel, bytes_of, plan_parcels, seen_as
from ._publication import TAG
from ._span import Span

_PACKED_BYTES: Final = 2**20  # larger tensors travel alone, from where they are to where they stay


@frozen
class _Sent:
    """A tensor of some rank's state."""

    owner: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def consolidate(
    states: Mapping[int, dict[str, Any]], *, to: int | None, group: Group
) -> dict[int, dict[str, Any]] | None:
    """Put all ranks' state together on one rank, or on all. Collective.

    Beside the result there are a tensor, or 1 MiB of small ones, in flight. What is this rank's
    own is not copied, where it is in host memory: the result has those very tensors.

    Args:
        states: This rank's, by the number of the parameter.
        to: The rank that receives it, a position in the group; None for all.
        group: The ranks.

    Returns:
        State in host memory, by number, ascending; None on ranks that do not receive it.

    Raises:
        StateError: On every rank, if the state of one holds what cannot travel.
    """
    own: list[Tensor] = []
    said, problem = [], ""
    for number, state in states.items():
        try:
            said.append([number, describe(state, own)])
        except StateError as error:
            problem = f"state of parameter {number} on rank {group.rank}: {error}"
            break
    answers = all_gather_json([problem, said], group=group, tag=TAG)
    problem = next((problem for problem, _ in answers if problem), "")
    if problem:
        raise StateError(f"consolidate_state_dict(): {problem} (seen on rank {group.rank})")
    sent = [
        _Sent(rank, dtype, shape)
        for rank, (_, of_rank) in enumerate(answers)
        for _, of_param in of_rank
        for dtype, shape in tensors_said(of_param)
    ]
    receives = to is None or to == group.rank
    values = _exchange(sent, own, to=to, group=group)
    if not receives:
        return None
    whole = {
        number: rebuild(of_param, values) for _, of_rank in answers for number, of_param in of_rank
    }
    return dict(sorted(whole.items()))


def _exchange(
    sent: Sequence[_Sent], own: Sequence[Tensor], *, to: int | None, group: Group
) -> Iterator[Tensor]:
    """Every rank's tensors, in order. Collective."""
    values: dict[int, Tensor] = {}
    mine = iter(own)
    for index, one in enumerate(sent):
        if one.owner == group.rank:
            values[index] = next(mine)
    travels = [i for i, one in enumerate(sent) if one.owner != to and one.num_bytes]
    small = [index for index in travels if sent[index].num_bytes <= _PACKED_BYTES]
    for parcel in plan_parcels(
        [sent[index].num_bytes for index in small],
        [sent[index].owner for index in small],
        world_size=group.world_size,
        limit=_PACKED_BYTES,
    ):
        _send_packed(parcel, small, sent, values, to=to, group=group)
    for index in travels:
        if sent[index].num_bytes > _PACKED_BYTES:
            _send_alone(index, sent[index], values, to=to, group=group)
    if to is None or to == group.rank:
        for index, one in enumerate(sent):
            if index not in values:  # it has no elements
                values[index] = torch.empty(one.shape, dtype=one.dtype)
            values[index] = values[index].cpu()
    return (values[index] for index in range(len(values)))


def _send_packed(
    parcel: Parcel,
    small: Sequence[int],
    sent: Sequence[_Sent],
    values: dict[int, Tensor],
    *,
    to: int | None,
    group: Group,
) -> None:
    rank, splits = group.rank, parcel.layout.splits
    shard = parcel.layout.shards[rank]
    mine = torch.zeros(shard.numel, dtype=torch.uint8, device=group.device)
    for position, owner, span in parcel.places():
        if owner == rank:
            value = values[small[position]]
            seen_as(mine, span.shifted(-shard.start), value.dtype, value.shape).copy_(value)
    wire = _gather(mine, splits, None, to=to, group=group)
    if wire is None:
        return
    for position, owner, span in parcel.places():
        if owner != rank:
            one = sent[small[position]]
            values[small[position]] = seen_as(wire, span, one.dtype, one.shape).to("cpu", copy=True)


def _send_alone(
    index: int, one: _Sent, values: dict[int, Tensor], *, to: int | None, group: Group
) -> None:
    splits = [one.num_bytes if rank == one.owner else 0 for rank in range(group.world_size)]
    if one.owner == group.rank:
        mine = bytes_of(values[index]).to(group.device)
        _gather(mine, splits, mine if to is None else None, to=to, group=group)
        return
    receives = to is None or to == group.rank
    out = torch.empty(one.num_bytes, dtype=torch.uint8, device=group.device) if receives else None
    nothing = torch.empty(0, dtype=torch.uint8, device=group.device)
    _gather(nothing, splits, out, to=to, group=group)
    if out is not None:
        # To the host at once, or a device would have all of it in the end.
        values[index] = seen_as(out, Span(0, one.num_bytes), one.dtype, one.shape).cpu()


def _gather(
    shard: Tensor,
    splits: Sequence[int],
    out: Tensor | None,
    *,
    to: int | None,
    group: Group,
) -> Tensor | None:
    if to is not None:
        return gather_flat(shard, splits=splits, to=to, group=group, out=out, tag=TAG).wait()
    out = shard.new_empty(sum(splits)) if out is None else out
    return all_gather_flat(
        out, splits=splits, group=group, shard=None if out is shard else shard, tag=TAG
    ).wait()
