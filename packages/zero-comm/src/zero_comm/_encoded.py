"""Collectives whose values travel encoded, in a group of several ranks.

What a rank has itself is encoded and decoded as well: after a gather all ranks have equal values,
and a reduction is one of what was sent. Sums are taken in float32 and in rank order, whatever the
backend, so one process with the same codec can repeat them bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._chunks import chunks_of
from ._codec import AbstractCodec
from ._group import Group
from ._handle import Handle
from ._launches import launch_exchange, launch_gather
from ._reduction import Reduction, finish_mean


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

    return Handle(finish)


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
    wire = encode_parts(chunks_of(buffer, splits), codec)
    wire_splits = [codec.wire_bytes(numel) for numel in splits]
    exchange = launch_exchange(wire, wire_splits, group=group, name=name, tag=tag)

    def finish(timeout_s: float | None) -> Tensor:
        total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        add_up(exchange.wait(timeout_s=timeout_s), total, codec)
        finish_mean(total, op=op, world_size=group.world_size)
        return out if total is out else out.copy_(total)

    return Handle(finish)


def all_reduce_encoded(
    buffer: Tensor,
    splits: Sequence[int],
    *,
    group: Group,
    op: Reduction,
    codec: AbstractCodec,
    tag: int,
) -> Handle[Tensor]:
    """A reduce-scatter and then a gather, each of them encoded."""
    name, own = "all_reduce", chunks_of(buffer, splits)[group.rank]
    reduction = reduce_scatter_encoded(
        buffer, splits, group=group, op=op, codec=codec, out=own, name=name, tag=tag
    )
    return reduction.then(
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


def encode_parts(parts: Sequence[Tensor], codec: AbstractCodec) -> Tensor:
    """Each part apart, one after the other in a new wire buffer."""
    wire, rows = wire_for(parts, codec)
    for part, row in zip(parts, rows, strict=True):
        codec.encode(part, row)
    return wire


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
