"""Collectives on one flat buffer, composed of what the backend does well.

A flat buffer of a group is cut into one chunk per rank, `splits[r]` elements each, in rank order.
Chunks may be uneven and may be empty. Sums are taken in rank order, ((g0 + g1) + g2) + ..., and a
mean divides the sum by the world size, so that one process can repeat the arithmetic bit for bit;
only nccl, which documents no order, is free of that promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zero_comm.codecs.codec import AbstractCodec, check_encodable

from .errors import GroupMismatchError
from .group import Group
from .handle import Handle
from .reduction import Reduction, finish_mean, torch_op
from .torch_private import is_profiled, unrecorded
from .transport import (
    begin,
    built_in,
    check_mean,
    check_tensor,
    chunks_of,
    count_traffic,
    even_splits,
    launch_exchange,
    launch_gather,
    launch_reduce_scatter,
    own_chunk,
)


def gather_encoded(
    out: Tensor,
    splits: Sequence[int],
    *,
    group: Group,
    shard: Tensor,
    codec: AbstractCodec,
    name: str,
    tag: int,
    version: int | None = None,
    is_late: bool = False,
) -> Handle[Tensor]:
    """Fill `out` from every rank's shard: values, or bytes that the codec has written already."""
    wire_splits = [codec.wire_bytes(numel) for numel in splits]
    wire = torch.empty(sum(wire_splits), dtype=torch.uint8, device=out.device)
    rows = chunks_of(wire, wire_splits)
    if shard.dtype == torch.uint8:
        rows[group.rank].copy_(shard)
    else:
        codec.encode(shard, rows[group.rank])
    gathering = launch_gather(
        wire, wire_splits, group=group, name=name, tag=tag, version=version, is_late=is_late
    )

    def finish(timeout_s: float | None) -> Tensor:
        gathering.wait(timeout_s=timeout_s)
        for row, chunk in zip(rows, chunks_of(out, splits), strict=True):
            codec.decode(row, chunk)
        return out

    return Handle(finish, inside=(gathering,))


def reduce_scatter_encoded(
    buffer: Tensor,
    splits: Sequence[int],
    *,
    group: Group,
    op: Reduction,
    codec: AbstractCodec,
    out: Tensor,
    name: str,
    tag: int,
) -> Handle[Tensor]:
    """Add this rank's chunk of every rank's `buffer` into `out`, which may be its own chunk.

    The buffer is read before this returns.
    """
    wire, rows = wire_for(parts := chunks_of(buffer, splits), codec)
    for part, row in zip(parts, rows, strict=True):
        codec.encode(part, row)
    wire_splits = [row.numel() for row in rows]
    exchange = launch_exchange(wire, wire_splits, group=group, name=name, tag=tag)

    def finish(timeout_s: float | None) -> Tensor:
        total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        add_up(exchange.wait(timeout_s=timeout_s), total, codec)
        finish_mean(total, op=op, world_size=group.world_size)
        return out if total is out else out.copy_(total)

    return Handle(finish, inside=(exchange,))


def wire_for(parts: Sequence[Tensor], codec: AbstractCodec) -> tuple[Tensor, list[Tensor]]:
    """A wire buffer, and in it a row for each part."""
    numels = [codec.wire_bytes(part.numel()) for part in parts]
    wire = torch.empty(sum(numels), dtype=torch.uint8, device=parts[0].device)
    return wire, chunks_of(wire, numels)


def add_up(rows: Sequence[Tensor], total: Tensor, codec: AbstractCodec) -> Tensor:
    """The sum of what rows decode to, in their order: float32, in `total`."""
    codec.decode(rows[0], total)
    for row in rows[1:]:
        codec.decode_add(row, total)
    return total


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
    codec: AbstractCodec | None = None,
) -> Handle[Tensor]:
    """Fill every rank's chunk of `out` with that rank's values. Collective; returns at once.

    With a codec, bytes travel, and every chunk of `out`, this rank's own too, is decoded from them
    in `wait`: the ranks' `out` are equal, and `shard` is not written. A group of one rank sends
    nothing, and its values stay exact.

    Args:
        out: 1-D, contiguous, `sum(splits)` elements, on the group's device; any dtype. Written in
            place; do not touch it until the handle was waited on.
        splits: Elements per rank, in rank order; the same on every rank.
        group: The ranks that take part.
        shard: This rank's values, `splits[rank]` elements. None when they are already in their
            chunk of `out`, in which case nothing is copied. With a codec, in any dtype that it
            takes, or uint8: the `codec.wire_bytes(splits[rank])` bytes that it has written already.
        tag: Identity of this collective: those with different tags may be launched in different
            order by different ranks where the backend allows it (gloo). Those with the same tag
            must be launched in the same order everywhere.
        version: Of the values, where they change in time: a rank that sends an older or a newer one
            is waited for in vain, as one with another tag is (gloo; modulo 3).
        payload: Elements per rank that carry data, for the traffic count; `splits` when None.
        control: Count it as `agree`, apart from data: flags, checksums, scalars.
        codec: How values are written while they travel; as they are when None.

    Returns:
        Handle of `out`.

    Raises:
        GroupMismatchError: `out` or `shard` does not fit `splits` or the group's device.
        CodecError: The codec does not take such a dtype.
    """
    own, numel = own_chunk(out, splits, group), splits[group.rank]
    name = "agree" if control else "all_gather"
    if codec is None:
        if shard is not None:
            check_tensor(shard, numel, group, "shard", dtype=out.dtype)
            own.copy_(shard)
        count_traffic(group, name, out, splits, payload, sends_own=True, tag=tag)
        return launch_gather(out, splits, group=group, name=name, tag=tag, version=version)
    shard = own if shard is None else shard
    is_written = shard.dtype == torch.uint8
    check_tensor(shard, codec.wire_bytes(numel) if is_written else numel, group, "shard")
    check_encodable((out,) if is_written else (out, shard), codec)
    count_traffic(group, name, out, splits, payload, sends_own=True, tag=tag, codec=codec)
    if group.world_size == 1:
        return Handle(lambda _: codec.decode(shard, out) if is_written else own.copy_(shard))
    return gather_encoded(
        out,
        splits,
        group=group,
        shard=shard,
        codec=codec,
        name=name,
        tag=tag,
        version=version,
    )


def reduce_scatter_flat(
    buffer: Tensor,
    *,
    splits: Sequence[int],
    group: Group,
    op: Reduction = Reduction.MEAN,
    out: Tensor | None = None,
    tag: int = 0,
    payload: Sequence[int] | None = None,
    codec: AbstractCodec | None = None,
) -> Handle[Tensor]:
    """Combine all ranks' `buffer` and keep this rank's chunk of the result. Collective.

    With a codec each rank's chunk for another, and its own chunk too, is encoded before this
    returns. They are decoded and added in float32 in `wait`, in rank order on every backend. A
    group of one rank sends nothing, and its values stay exact.

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
        codec: How values are written while they travel; as they are when None.

    Returns:
        Handle of `out`. On gloo the sum is taken in `wait`, in rank order.

    Raises:
        GroupMismatchError: `buffer` or `out` does not fit `splits` or the group's device, or the
            buffer's dtype has no mean.
        CodecError: The codec does not take such a dtype.
    """
    own = own_chunk(buffer, splits, group)
    check_mean(buffer, op, group)
    if out is None:
        out = torch.empty_like(own)
    else:
        check_tensor(out, own.numel(), group, "out", dtype=buffer.dtype)
    name = "reduce_scatter"
    if codec is not None:
        check_encodable((buffer,), codec)
    count_traffic(group, name, buffer, splits, payload, sends_own=False, tag=tag, codec=codec)
    if codec is None or group.world_size == 1:
        return launch_reduce_scatter(buffer, splits, group=group, op=op, out=out, tag=tag)
    return reduce_scatter_encoded(
        buffer, splits, group=group, op=op, codec=codec, out=out, name=name, tag=tag
    )


def all_reduce_flat(
    buffer: Tensor,
    *,
    group: Group,
    op: Reduction = Reduction.MEAN,
    splits: Sequence[int] | None = None,
    tag: int = 0,
    payload: Sequence[int] | None = None,
    codec: AbstractCodec | None = None,
) -> Handle[Tensor]:
    """Combine all ranks' `buffer`, in place, into the same values everywhere. Collective.

    On gloo it is a reduce-scatter and an all-gather of the chunks in `splits` (even ones when
    None), so that its sums are bit for bit those of `reduce_scatter_flat`; the all-gather is
    launched by `advance` or `wait`. With a codec it is that on every backend: what travels is
    encoded twice, as a contribution and as a result, and all ranks have equal values. A group of
    one rank sends nothing, and its values stay exact.

    Args:
        buffer: 1-D, contiguous, on the group's device.
        group: The ranks that take part.
        op: MEAN or SUM.
        splits: Which rank adds up which elements.
        tag: As for `all_gather_flat`; in addition all-reduces with the same tag must be advanced
            and waited on in the same order everywhere.
        payload: As for `all_gather_flat`.
        codec: How values are written while they travel; as they are when None.

    Returns:
        Handle of `buffer`.

    Raises:
        GroupMismatchError: `buffer` does not fit `splits` or the group's device, or has no mean.
        CodecError: The codec does not take such a dtype.
    """
    if splits is None:
        splits = even_splits(buffer.numel(), group.world_size)
    own = own_chunk(buffer, splits, group)
    check_mean(buffer, op, group)
    name = "all_reduce"
    check_encodable((buffer,), codec)
    for sends_own in (False, True):
        count_traffic(
            group,
            name,
            buffer,
            splits,
            payload,
            sends_own=sends_own,
            tag=tag,
            calls=int(sends_own),
            codec=codec,
        )
    if group.world_size == 1:
        return Handle(lambda _: buffer)
    if codec is not None:
        return reduce_scatter_encoded(
            buffer, splits, group=group, op=op, codec=codec, out=own, name=name, tag=tag
        ).then(
            lambda reduced: gather_encoded(
                buffer,
                splits,
                group=group,
                shard=reduced,
                codec=codec,
                name=name,
                tag=tag,
                is_late=True,
            )
        )
    if not group.backend.composes_from_peers:
        launch = begin(group, name, tag, buffer.dtype, splits)
        message = built_in(launch, dist.all_reduce, buffer, torch_op(op), group=group)
        return Handle(lambda _: buffer, (message,), (buffer,))
    return launch_reduce_scatter(buffer, splits, group=group, op=op, out=own, tag=tag).then(
        lambda _: launch_gather(buffer, splits, group=group, name=name, tag=tag, is_late=True)
    )


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
    # Bytes are sent, as gloo has few dtypes.
    wire = buffer.view(torch.uint8)
    launch = begin(group, "broadcast", 0, buffer.dtype, splits)
    send = partial(unrecorded, dist.broadcast) if is_profiled() else dist.broadcast
    peer = -1
    if group.backend.composes_from_peers:
        # In gloo's tree all values come from `src`, which first sends to the rank after it.
        peer = src if group.rank != src else (src + 1) % group.world_size
    message = built_in(launch, send, wire, group.global_rank(src), group=group, peer=peer)
    return Handle(lambda _: buffer, (message,), (buffer,))


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
            None. Ignored on other ranks.
        tag: As for `all_gather_flat`.

    Returns:
        Handle of `out` on rank `to`, and of None on other ranks.

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
    sent = [shard.numel() if rank == to else 0 for rank in range(group.world_size)]
    count_traffic(group, "gather", shard, sent, None, sends_own=False, tag=tag)
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
    return group.exchanges.exchange(
        shard,
        result,
        sends=[shard if rank == to else shard[:0] for rank in range(group.world_size)],
        receives=chunks,
        offsets=[0] * group.world_size,
        launch=begin(group, f"gather to {to}", tag, shard.dtype, splits),
    )
