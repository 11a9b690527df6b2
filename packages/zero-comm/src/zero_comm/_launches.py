"""Collectives on a flat buffer that fits and is counted: the backend's own, or composed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor

from ._by_messages import exchange_by_messages, gather_by_messages, reduce_scatter_by_messages
from ._by_reading import exchange_by_reading, gather_by_reading, reduce_scatter_by_reading
from ._chunks import chunks_of
from ._group import Group
from ._handle import Handle, Message
from ._reduction import Reduction
from ._torch_compat import all_gather_single, reduce_scatter_single
from ._watch import Watch

# Tags far from those a user of torch's send and recv would choose on the same group: torch takes
# what is positive and has 31 bits.
_TAG_BASE: Final = 1 << 24
_VERSION_BASE: Final = 1 << 29
_NUM_VERSIONS: Final = 3  # so many are told apart, counted round


def launch_gather(
    buffer: Tensor,
    splits: Sequence[int],
    *,
    group: Group,
    name: str,
    tag: int,
    version: int | None = None,
    is_late: bool = False,
) -> Handle[Tensor]:
    """Fill the peers' chunks of `buffer` with theirs."""
    chunks = chunks_of(buffer, splits)
    if group.world_size == 1:
        return Handle(lambda _: buffer)
    if group.backend.composes_from_peers:
        key = key_of(tag, version=version, is_late=is_late)
        launch = watch_of(group).launch(name, key, tag=tag, version=version)
        # A message reaches its peer even if this rank ends before it is read: what controls must.
        if group.peers is None or name == "agree":
            return gather_by_messages(buffer, chunks, group=group, launch=launch)
        return gather_by_reading(buffer, chunks, peers=group.peers, launch=launch)
    own = chunks[group.rank]
    if len(set(splits)) == 1:
        work = all_gather_single(buffer, own, group=group.process_group, async_op=True)
    else:
        work = dist.all_gather(chunks, own, group=group.process_group, async_op=True)
    return Handle(lambda _: buffer, (Message(work, "all_gather"),), (buffer,))


def launch_reduce_scatter(
    buffer: Tensor, splits: Sequence[int], *, group: Group, op: Reduction, out: Tensor, tag: int
) -> Handle[Tensor]:
    """Add this rank's chunk of every rank's `buffer` into `out`, which may be its own chunk."""
    chunks = chunks_of(buffer, splits)
    own = chunks[group.rank]
    if group.world_size == 1:
        if out.data_ptr() != own.data_ptr():
            out.copy_(own)
        return Handle(lambda _: out)
    if group.backend.composes_from_peers:
        peers = group.peers
        launch = watch_of(group).launch("reduce_scatter", key_of(tag), tag=tag)
        if peers is None:
            return reduce_scatter_by_messages(
                buffer, chunks, group=group, op=op, out=out, launch=launch
            )
        return reduce_scatter_by_reading(buffer, chunks, peers=peers, op=op, out=out, launch=launch)
    if len(set(splits)) == 1:
        work = reduce_scatter_single(
            out, buffer, torch_op(group, op), group=group.process_group, async_op=True
        )
    else:
        reduce_op = torch_op(group, op)
        work = dist.reduce_scatter(out, chunks, reduce_op, group=group.process_group, async_op=True)
    return Handle(lambda _: out, (Message(work, "reduce_scatter"),), (buffer, out))


def launch_exchange(
    buffer: Tensor,
    splits: Sequence[int],
    *,
    group: Group,
    name: str,
    tag: int,
    is_late: bool = False,
) -> Handle[list[Tensor]]:
    """Give every rank its chunk of `buffer`: a handle of the chunks for this rank, by sender."""
    chunks = chunks_of(buffer, splits)
    own = chunks[group.rank]
    rows = [own.new_empty(own.shape) for _ in chunks]
    if not group.backend.composes_from_peers:
        work = dist.all_to_all(rows, chunks, group=group.process_group, async_op=True)
        return Handle(lambda _: rows, (Message(work, name),), (buffer, rows))
    rows[group.rank] = own
    launch = watch_of(group).launch(name, key_of(tag, is_late=is_late), tag=tag)
    if group.peers is None:
        return exchange_by_messages(buffer, chunks, rows, group=group, launch=launch)
    return exchange_by_reading(buffer, chunks, rows, peers=group.peers, launch=launch)


def watch_of(group: Group) -> Watch:
    """What waits for messages of a backend that composes."""
    assert group.watch is not None, "where a backend composes, the group has a watch"
    return group.watch


def key_of(tag: int, *, version: int | None = None, is_late: bool = False) -> int:
    """What messages carry, so that only those of one collective meet.

    What is launched in `wait` is late: ranks may wait before or after they launch something else.
    """
    part = 0 if version is None else 1 + version % _NUM_VERSIONS
    return _TAG_BASE + 2 * tag + is_late + part * _VERSION_BASE


def torch_op(group: Group, op: Reduction) -> Any:
    """Torch's name of a reduction."""
    assert group.backend.reduces_mean, f"{group.backend.name} has no mean of its own"
    return dist.ReduceOp.AVG if op is Reduction.MEAN else dist.ReduceOp.SUM
