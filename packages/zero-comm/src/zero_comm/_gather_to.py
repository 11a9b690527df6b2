"""All ranks' values, for one rank alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._by_messages import gather_to_by_messages
from ._by_reading import gather_to_by_reading
from ._chunks import check_tensor, chunks_of
from ._errors import GroupMismatchError
from ._group import Group
from ._handle import Handle
from ._launches import key_of, watch_of
from ._sent import Sent


def gather_flat(
    shard: Tensor,
    *,
    splits: Sequence[int],
    to: int,
    group: Group,
    out: Tensor | None = None,
    tag: int = 0,
) -> Handle[Tensor | None]:
    """Give one rank every rank's values, end to end in rank order. Collective; returns at once.

    Args:
        shard: This rank's values: 1-D, contiguous, `splits[rank]` elements, on the group's device;
            any dtype, the same on every rank. Do not write it until the handle was waited on.
        splits: Elements per rank, in rank order; the same on every rank. May be uneven, or zero.
        to: Who receives, a position in the group.
        group: The ranks that take part.
        out: On rank `to`, what to fill: 1-D, contiguous, `sum(splits)` elements; allocated when
            None. Not looked at elsewhere.
        tag: As for `all_gather_flat`.

    Returns:
        Handle of `out` on rank `to`, and of None elsewhere.

    Raises:
        GroupMismatchError: `to` is no rank of the group, or a tensor does not fit.
    """
    if not 0 <= to < group.world_size or len(splits) != group.world_size:
        raise GroupMismatchError(
            f"expected `to` in 0..{group.world_size - 1} and as many splits, got {to} and "
            f"{len(splits)} splits (rank {group.rank})"
        )
    check_tensor(shard, splits[group.rank], group, "shard")
    is_target = group.rank == to
    numel = 0 if is_target else shard.numel()
    sent = Sent(numel, numel * shard.element_size())
    inside, across = (Sent(), sent) if group.is_across(to) else (sent, Sent())
    group.count("gather", inside=inside, across=across, tag=tag)
    chunks: list[Tensor] = []
    if is_target:
        out = shard.new_empty(sum(splits)) if out is None else out
        check_tensor(out, sum(splits), group, "out", dtype=shard.dtype)
        chunks = chunks_of(out, splits)
        with torch.no_grad():
            chunks[to].copy_(shard)
    result = out if is_target else None
    if group.world_size == 1:
        return Handle(lambda _: result)
    launch = None
    if group.backend.composes_from_peers:
        launch = watch_of(group).launch("gather", key_of(tag), tag=tag)
        if group.peers is not None:
            return gather_to_by_reading(
                shard, result, chunks, splits=splits, peers=group.peers, launch=launch
            )
    messages = gather_to_by_messages(shard, chunks, to=to, group=group, launch=launch)
    return Handle(lambda _: result, messages, (shard, out))
