"""Reductions in two hops: inside each node, and what that leaves across nodes.

Rank r of N nodes with L ranks is the r % L-th of node r // L. In the first hop the ranks of a node
add up, each for its counterparts on all nodes, the chunks of these: rank l has then the node's sums
of chunks l, L + l, 2L + l, ... In the second hop the counterparts exchange and add those. So across
nodes go (N-1) chunks from each rank, not (N-1) L; and rank r has its own chunk, as without levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from ._cast import Cast
from ._chunks import check_mean, check_tensor, chunks_of, own_chunk
from ._codec import AbstractCodec, check_encodable
from ._encoded import add_up, wire_for
from ._group import Group
from ._handle import Handle
from ._launches import launch_exchange
from ._levels import Levels
from ._loco import Level, LocoErrors
from ._reduction import Reduction, finish_mean
from ._sent import Sent, chunk_sent

_NAME: Final = "reduce_scatter"


def reduce_scatter_by_levels(
    buffer: Tensor,
    *,
    splits: Sequence[int],
    levels: Levels,
    codec: AbstractCodec | None = None,
    errors: LocoErrors | None = None,
    op: Reduction = Reduction.MEAN,
    out: Tensor | None = None,
    tag: int = 0,
    payload: Sequence[int] | None = None,
) -> Handle[Tensor]:
    """Combine all ranks' `buffer` in two hops and keep this rank's chunk. Collective.

    Values are encoded once for each hop, chunk by chunk, decoded, and added in float32: over the
    ranks of a node in their order, then over the nodes in theirs. A hop between one rank moves
    nothing and encodes nothing. The second hop is launched by `advance` or `wait`, and `buffer` is
    this rank's own again from then on: reductions over the same levels must be advanced and waited
    on in the same order everywhere.

    Args:
        buffer: 1-D, contiguous, `sum(splits)` elements; float32, bfloat16 or float16, on the
            group's device. Borrowed until the handle was waited on; written only where `out` is a
            part of it.
        splits: Elements per rank of `levels.whole`, in rank order; the same on every rank.
        levels: The ranks that take part.
        codec: How values are written while they travel; in the buffer's dtype when None.
        errors: Where the errors of encoding are kept and fed back; they are not when None.
        op: MEAN or SUM.
        out: Receives the result, `splits[rank]` elements of the buffer's dtype; may be this rank's
            chunk of `buffer`. Allocated when None.
        tag: As for `all_gather_flat`.
        payload: As for `all_gather_flat`.

    Returns:
        Handle of `out`.

    Raises:
        GroupMismatchError: `buffer` or `out` does not fit `splits` or the group's device.
        CodecError: The buffer's dtype is none of these, or `errors` are of another buffer.
    """
    whole = levels.whole
    own = own_chunk(buffer, splits, whole)
    check_mean(buffer, op, whole)
    codec = Cast(buffer.dtype) if codec is None else codec
    check_encodable((buffer,), codec)
    if out is None:
        out = torch.empty_like(own)
    else:
        check_tensor(out, own.numel(), whole, "out", dtype=buffer.dtype)
    payload = splits if payload is None else payload
    parts = [[chunk] for chunk in chunks_of(buffer, splits)]
    count_hops(parts, [[numel] for numel in payload], levels=levels, codec=codec, tag=tag)
    reduction = add_by_levels(parts, levels=levels, codec=codec, errors=errors, tag=tag)

    def finish(totals: list[Tensor]) -> Tensor:
        (total,) = totals
        finish_mean(total, op=op, world_size=whole.world_size)
        return out.copy_(total)

    return reduction.map(finish)


def add_by_levels(
    parts: Sequence[Sequence[Tensor]],
    *,
    levels: Levels,
    codec: AbstractCodec,
    errors: LocoErrors | None,
    tag: int,
) -> Handle[list[Tensor]]:
    """Send each rank of the whole its parts; a handle of the sums of this rank's, in float32."""
    if errors is not None:
        errors.begin()
    num_local, num_parts = levels.inside.world_size, len(parts[0])
    inside = _Hop(levels.inside, Level.INSIDE, codec, errors)
    across = _Hop(levels.across, Level.ACROSS, codec, errors)
    # For each rank of this node, what goes to its counterparts on all nodes.
    by_local = [list(chain(*parts[local::num_local])) for local in range(num_local)]
    first = inside.launch(by_local, tag=tag)

    def launch_second(sums: list[Tensor]) -> Handle[list[Tensor]]:
        left = iter(sums)
        by_node = [list(islice(left, num_parts)) for _ in range(levels.num_nodes)]
        return across.launch(by_node, tag=tag, is_late=True)

    if num_local == 1:
        return launch_second(first.wait())  # nothing travels in the first
    return first if levels.num_nodes == 1 else first.then(launch_second)


def count_hops(
    parts: Sequence[Sequence[Tensor]],
    payload: Sequence[Sequence[int]],
    *,
    levels: Levels,
    codec: AbstractCodec,
    tag: int,
) -> None:
    """One call, whose two hops send different parts."""
    if not levels.whole.is_counted:
        return
    inside, across = _sent(
        tuple(tuple(part.numel() for part in row) for row in parts),
        tuple(tuple(row) for row in payload),
        rank=levels.whole.rank,
        num_local=levels.inside.world_size,
        codec=codec,
    )
    levels.whole.count(_NAME, inside=inside, across=across, tag=tag)


def sent_by_levels(
    splits: Sequence[int],
    payload: Sequence[int],
    *,
    rank: int,
    ranks_per_node: int,
    codec: AbstractCodec,
) -> tuple[Sent, Sent]:
    """What one rank sends in a `reduce_scatter_by_levels`: inside its node, and across. Local.

    Args:
        splits: Elements per rank, in rank order.
        payload: Those of them that carry data.
        rank: Whose.
        ranks_per_node: Neighbours in rank order share a node.
        codec: In which chunks travel.
    """
    numels, carried = (tuple((numel,) for numel in of) for of in (splits, payload))
    return _sent(numels, carried, rank=rank, num_local=ranks_per_node, codec=codec)


@lru_cache(maxsize=4096)  # the same reductions come again in every step
def _sent(
    numels: tuple[tuple[int, ...], ...],
    payload: tuple[tuple[int, ...], ...],
    *,
    rank: int,
    num_local: int,
    codec: AbstractCodec,
) -> tuple[Sent, Sent]:
    """In the first hop and in the second; by rank and part."""
    inside, across = Sent(), Sent()
    node, local = divmod(rank, num_local)
    for peer, row in enumerate(zip(numels, payload, strict=True)):
        parts = zip(*row, strict=True)
        sent = (chunk_sent(*part, itemsize=1, codec=codec) for part in parts)
        if peer % num_local != local:
            inside = sum(sent, start=inside)
        elif peer // num_local != node:
            across = sum(sent, start=across)
    return inside, across


@frozen(eq=False)
class _Hop:
    """An exchange in which each rank adds up what all have for it."""

    group: Group
    level: Level
    codec: AbstractCodec
    errors: LocoErrors | None

    def launch(
        self, parts: Sequence[Sequence[Tensor]], *, tag: int, is_late: bool = False
    ) -> Handle[list[Tensor]]:
        """Send each rank its parts; a handle of the sums of this rank's, in float32."""
        codec, own = self.codec, parts[self.group.rank]
        if self.group.world_size == 1:
            return Handle(lambda _: [part.float() for part in own], (), own)
        sent = [part for each in parts for part in each]
        wire, rows = wire_for(sent, codec)
        if self.errors is None:
            for part, row in zip(sent, rows, strict=True):
                codec.encode(part, row)
        else:
            self.errors.encode(self.level, sent, rows, codec)
        wire_splits = [sum(codec.wire_bytes(part.numel()) for part in each) for each in parts]
        exchange = launch_exchange(
            wire, wire_splits, group=self.group, name=_NAME, tag=tag, is_late=is_late
        )

        def finish(timeout_s: float | None) -> list[Tensor]:
            numels = [codec.wire_bytes(part.numel()) for part in own]
            received = [chunks_of(row, numels) for row in exchange.wait(timeout_s=timeout_s)]
            return [
                add_up(rows, torch.empty_like(part, dtype=torch.float32), codec)
                for part, *rows in zip(own, *received, strict=True)
            ]

        return Handle(finish)
