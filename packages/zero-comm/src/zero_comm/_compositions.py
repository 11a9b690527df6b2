"""Collectives on one flat buffer, composed of what the backend does well.

A flat buffer of a group is cut into one chunk per rank, `splits[r]` elements each, in rank order.
Chunks may be uneven and may be empty. Sums are taken in rank order, ((g0 + g1) + g2) + ..., and a
mean divides the sum by the world size, so that one process can repeat the arithmetic bit for bit;
only nccl, which documents no order, is free of that promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ._by_messages import gather_by_messages, reduce_scatter_by_messages
from ._by_reading import gather_by_reading, reduce_scatter_by_reading
from ._errors import GroupMismatchError
from ._group import Group
from ._handle import Handle, Message
from ._peer_memory import PeerMemory
from ._reduction import Reduction
from ._torch_compat import all_gather_single, reduce_scatter_single
from ._traffic import Sent
from ._watch import Watch

# Tags far from those a user of torch's send and recv would choose on the same group: torch takes
# what is positive and has 31 bits.
_TAG_BASE: Final = 1 << 24
_VERSION_BASE: Final = 1 << 29
_NUM_VERSIONS: Final = 3  # so many are told apart, counted round
_BUILT_IN: Final = -1  # torch's own collectives meet in the order of their launches


def all_gather_flat(
    out: Tensor,
    *,
    splits: Sequence[int],
    group: Group,
    shard: Tensor | None = None,
    tag: int = 0,
    version: int | None = None,
    payload: Sequence[int] | None = None,
    control: bool = False,
) -> Handle[Tensor]:
    """Fill every rank's chunk of `out` with that rank's values. Collective; returns at once.

    Args:
        out: 1-D, contiguous, `sum(splits)` elements, on the group's device; any dtype. Written in
            place; do not touch it until the handle was waited on.
        splits: Elements per rank, in rank order; the same on every rank.
        group: The ranks that take part.
        shard: This rank's values, `splits[rank]` elements. None when they are already in their
            chunk of `out`, in which case nothing is copied.
        tag: Identity of this collective: those with different tags may be launched in different
            order by different ranks where the backend allows it (gloo). Those with the same tag
            must be launched in the same order everywhere.
        version: Of the values, where they change in time: a rank that sends an older or a newer one
            is waited for in vain, as one with another tag is (gloo; modulo 3).
        payload: Elements per rank that carry data, for the traffic count; `splits` when None.
        control: Count it as `agree`, apart from data: flags, fingerprints, scalars.

    Returns:
        Handle of `out`.

    Raises:
        GroupMismatchError: `out` or `shard` does not fit `splits` or the group's device.
    """
    own = _own_chunk(out, splits, group)
    if shard is not None:
        check_tensor(shard, splits[group.rank], group, "shard", dtype=out.dtype)
        own.copy_(shard)
    name = "agree" if control else "all_gather"
    count_traffic(group, name, out, splits, payload, sends_own=True, tag=tag)
    if group.world_size == 1:
        return Handle(lambda _: out)
    if group.backend.composes_from_peers:
        # A message reaches its peer even if this rank ends before it is read: what controls must.
        peers = None if control else group.peers
        return _gather(out, splits, group=group, peers=peers, name=name, tag=tag, version=version)
    if len(set(splits)) == 1:
        work = all_gather_single(out, own, group=group.process_group, async_op=True)
    else:
        chunks = chunks_of(out, splits)
        work = dist.all_gather(chunks, own, group=group.process_group, async_op=True)
    return Handle(lambda _: out, (Message(work, "all_gather"),), (out,))


def reduce_scatter_flat(
    buffer: Tensor,
    *,
    splits: Sequence[int],
    group: Group,
    op: Reduction = Reduction.MEAN,
    out: Tensor | None = None,
    tag: int = 0,
    payload: Sequence[int] | None = None,
) -> Handle[Tensor]:
    """Combine all ranks' `buffer` and keep this rank's chunk of the result. Collective.

    Args:
        buffer: 1-D, contiguous, `sum(splits)` elements, on the group's device. Borrowed until the
            handle was waited on; written only where `out` is a part of it.
        splits: Elements per rank, in rank order; the same on every rank.
        group: The ranks that take part.
        op: MEAN or SUM.
        out: Receives the result, `splits[rank]` elements of the buffer's dtype; may be this rank's
            chunk of `buffer`. Allocated when None.
        tag: As for `all_gather_flat`.
        payload: As for `all_gather_flat`.

    Returns:
        Handle of `out`. On gloo the sum is taken in `wait`, in rank order.

    Raises:
        GroupMismatchError: `buffer` or `out` does not fit `splits` or the group's device, or the
            buffer's dtype has no mean.
    """
    own = _own_chunk(buffer, splits, group)
    _check_mean(buffer, op, group)
    if out is None:
        out = torch.empty_like(own)
    else:
        check_tensor(out, own.numel(), group, "out", dtype=buffer.dtype)
    count_traffic(group, "reduce_scatter", buffer, splits, payload, sends_own=False, tag=tag)
    return _reduce_scatter(buffer, splits=splits, group=group, op=op, out=out, tag=tag)


def all_reduce_flat(
    buffer: Tensor,
    *,
    group: Group,
    op: Reduction = Reduction.MEAN,
    splits: Sequence[int] | None = None,
    tag: int = 0,
    payload: Sequence[int] | None = None,
) -> Handle[Tensor]:
    """Combine all ranks' `buffer`, in place, into the same values everywhere. Collective.

    On gloo it is a reduce-scatter and an all-gather of the chunks in `splits` (even ones when
    None), so that its sums are bit for bit those of `reduce_scatter_flat`; the all-gather is
    launched in `wait`.

    Args:
        buffer: 1-D, contiguous, on the group's device.
        group: The ranks that take part.
        op: MEAN or SUM.
        splits: Which rank adds up which elements.
        tag: As for `all_gather_flat`; in addition all-reduces with the same tag must be waited on
            in the same order everywhere.
        payload: As for `all_gather_flat`.

    Returns:
        Handle of `buffer`.

    Raises:
        GroupMismatchError: `buffer` does not fit `splits` or the group's device, or has no mean.
    """
    if splits is None:
        splits = even_splits(buffer.numel(), group.world_size)
    own = _own_chunk(buffer, splits, group)
    _check_mean(buffer, op, group)
    count_traffic(group, "all_reduce", buffer, splits, payload, sends_own=False, tag=tag)
    count_traffic(group, "all_reduce", buffer, splits, payload, sends_own=True, tag=tag, calls=0)
    if group.world_size == 1:
        return Handle(lambda _: buffer)
    if not group.backend.composes_from_peers:
        reduce_op = _torch_op(group, op)
        work = dist.all_reduce(buffer, reduce_op, group=group.process_group, async_op=True)
        return Handle(lambda _: buffer, (Message(work, "all_reduce"),), (buffer,))
    reduction = _reduce_scatter(buffer, splits=splits, group=group, op=op, out=own, tag=tag)

    def finish(timeout_s: float | None) -> Tensor:
        reduction.wait(timeout_s=timeout_s)
        gathering = _gather(
            buffer,
            splits,
            group=group,
            peers=group.peers,
            name="all_reduce",
            tag=tag,
            is_late=True,
        )
        return gathering.wait(timeout_s=timeout_s)

    return Handle(finish, (), (buffer,))


def broadcast_flat(buffer: Tensor, *, src: int, group: Group) -> Handle[Tensor]:
    """Give every rank the values of position `src` of the group, in place. Collective.

    Args:
        buffer: 1-D, contiguous, on the group's device; the same numel and dtype on every rank.
        src: Position in the group, not in the job.
        group: The ranks that take part.

    Returns:
        Handle of `buffer`.

    Raises:
        GroupMismatchError: `src` is no rank of the group, or `buffer` does not fit.
    """
    if not 0 <= src < group.world_size:
        raise GroupMismatchError(
            f"expected src in 0..{group.world_size - 1}, a position in the group, got {src} "
            f"(rank {group.rank})"
        )
    check_tensor(buffer, buffer.numel(), group, "buffer")
    splits = [buffer.numel() if rank == src else 0 for rank in range(group.world_size)]
    count_traffic(group, "broadcast", buffer, splits, None, sends_own=True)
    if group.world_size == 1:
        return Handle(lambda _: buffer)
    launch = group.watch.launch("broadcast", _BUILT_IN) if group.watch is not None else None
    wire = buffer.view(torch.uint8)  # gloo knows few dtypes
    work = dist.broadcast(wire, group.global_rank(src), group=group.process_group, async_op=True)
    # gloo's tree: all comes from `src`, which sends to the rank after it first.
    peer = src if group.rank != src else (src + 1) % group.world_size
    return Handle(lambda _: buffer, (Message(work, "broadcast", launch, peer),), (buffer,))


def even_splits(numel: int, world_size: int) -> tuple[int, ...]:
    """Cut `numel` elements into chunks that differ by one at most."""
    quotient, rest = divmod(numel, world_size)
    return tuple(quotient + (rank < rest) for rank in range(world_size))


def _reduce_scatter(
    buffer: Tensor, *, splits: Sequence[int], group: Group, op: Reduction, out: Tensor, tag: int
) -> Handle[Tensor]:
    own = chunks_of(buffer, splits)[group.rank]
    if group.world_size == 1:
        if out.data_ptr() != own.data_ptr():
            out.copy_(own)
        return Handle(lambda _: out)
    if group.backend.composes_from_peers:
        chunks, peers = chunks_of(buffer, splits), group.peers
        launch = watch_of(group).launch("reduce_scatter", key_of(tag), tag=tag)
        if peers is None:
            return reduce_scatter_by_messages(
                buffer, chunks, group=group, op=op, out=out, launch=launch
            )
        return reduce_scatter_by_reading(buffer, chunks, peers=peers, op=op, out=out, launch=launch)
    if len(set(splits)) == 1:
        work = reduce_scatter_single(
            out, buffer, _torch_op(group, op), group=group.process_group, async_op=True
        )
    else:
        work = dist.reduce_scatter(
            out,
            list(chunks_of(buffer, splits)),
            _torch_op(group, op),
            group=group.process_group,
            async_op=True,
        )
    return Handle(lambda _: out, (Message(work, "reduce_scatter"),), (buffer, out))


def _gather(
    buffer: Tensor,
    splits: Sequence[int],
    *,
    group: Group,
    peers: PeerMemory | None,
    name: str,
    tag: int,
    version: int | None = None,
    is_late: bool = False,
) -> Handle[Tensor]:
    chunks, key = chunks_of(buffer, splits), key_of(tag, version=version, is_late=is_late)
    launch = watch_of(group).launch(name, key, tag=tag, version=version)
    if peers is None:
        return gather_by_messages(buffer, chunks, group=group, launch=launch)
    return gather_by_reading(buffer, chunks, peers=peers, launch=launch)


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


def _torch_op(group: Group, op: Reduction) -> Any:
    assert group.backend.reduces_mean, f"{group.backend.name} has no mean of its own"
    return dist.ReduceOp.AVG if op is Reduction.MEAN else dist.ReduceOp.SUM


def chunks_of(buffer: Tensor, splits: Sequence[int]) -> list[Tensor]:
    """A flat buffer, cut as the splits say."""
    return [buffer[start:stop] for start, stop in pairwise(accumulate(splits, initial=0))]


def _own_chunk(buffer: Tensor, splits: Sequence[int], group: Group) -> Tensor:
    if len(splits) != group.world_size:
        raise GroupMismatchError(
            f"expected one split per rank, {group.world_size} in all, got {len(splits)} "
            f"(rank {group.rank})"
        )
    check_tensor(buffer, sum(splits), group, "buffer")
    start = sum(splits[: group.rank])
    return buffer[start : start + splits[group.rank]]


def check_tensor(
    tensor: Tensor, numel: int, group: Group, name: str, *, dtype: torch.dtype | None = None
) -> None:
    """Raise GroupMismatchError unless its memory can be taken as it is."""
    is_dense = tensor.layout == torch.strided
    if not is_dense or tensor.shape != (numel,) or not tensor.is_contiguous():
        strides = f" with strides {tensor.stride()}" if is_dense else ""
        raise GroupMismatchError(
            f"expected {name} to be 1-D, dense and contiguous with {numel} elements, got "
            f"{tensor.layout} of shape {tuple(tensor.shape)}{strides} (rank {group.rank}); flatten "
            "it with tensor.contiguous().view(-1)"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise GroupMismatchError(
            f"expected {name} with its values in memory, got a lazily conjugated or negated view "
            f"(rank {group.rank}); pass tensor.resolve_conj().resolve_neg()"
        )
    if tensor.device != group.device:
        raise GroupMismatchError(
            f"expected {name} on {group.device}, where this group communicates, got "
            f"{tensor.device} (rank {group.rank}); move it, or make the group for that device"
        )
    if dtype is not None and tensor.dtype != dtype:
        raise GroupMismatchError(
            f"expected {name} to be {dtype} as the buffer is, got {tensor.dtype} (rank "
            f"{group.rank}); convert it first, values travel as they are"
        )


def _check_mean(buffer: Tensor, op: Reduction, group: Group) -> None:
    if op is Reduction.MEAN and not (buffer.is_floating_point() or buffer.is_complex()):
        raise GroupMismatchError(
            f"expected a floating point dtype for a mean, got {buffer.dtype} (rank {group.rank}); "
            "use Reduction.SUM"
        )


def count_traffic(
    group: Group,
    name: str,
    buffer: Tensor,
    splits: Sequence[int],
    payload: Sequence[int] | None,
    *,
    sends_own: bool,
    tag: int | None = None,
    calls: int = 1,
) -> None:
    """Tell whoever records traffic what an operation on this buffer asks this rank to send.

    To each peer, that is its own chunk, or the peer's.
    """
    if not group.is_counted:
        return
    chunks = tuple(splits), tuple(splits if payload is None else payload)
    inside, across = _sent(
        *chunks, group.nodes, rank=group.rank, sends_own=sends_own, itemsize=buffer.element_size()
    )
    group.count(name, inside=inside, across=across, calls=calls, tag=tag)


@lru_cache(maxsize=4096)  # the same collectives come again in every step
def _sent(
    splits: tuple[int, ...],
    payload: tuple[int, ...],
    nodes: tuple[int, ...],
    *,
    rank: int,
    sends_own: bool,
    itemsize: int,
) -> tuple[Sent, Sent]:
    """Inside the rank's node, and across."""
    payload_numel, padding_numel = [0, 0], [0, 0]
    for peer in range(len(splits)):
        if peer != rank:
            level = bool(nodes) and nodes[peer] != nodes[rank]
            chunk = rank if sends_own else peer
            payload_numel[level] += payload[chunk]
            padding_numel[level] += splits[chunk] - payload[chunk]
    inside, across = (
        Sent(numel, numel * itemsize, padding * itemsize)
        for numel, padding in zip(payload_numel, padding_numel, strict=True)
    )
    return inside, across
