"""Compositions of sends and receives between every two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ._group import Group
from ._handle import Handle, Message, failure
from ._reduction import Reduction, finish_mean
from ._watch import Launch

# Messages of this size let the local sum run while later messages arrive, and stay in cache for
# it. Between 512 KiB and 8 MiB the time hardly changes (benchmarks/bench_collectives.py).
PIECE_BYTES: Final = 2 * 2**20


def gather_by_messages(
    buffer: Tensor, chunks: Sequence[Tensor], *, group: Group, launch: Launch
) -> Handle[Tensor]:
    """Send to and receive from every peer, the next rank first so that no rank is a hot spot."""
    own = chunks[group.rank]
    messages = []
    for distance in range(1, group.world_size):
        peer = (group.rank - distance) % group.world_size
        if chunks[peer].numel():
            messages.append(_receive(chunks[peer], peer, group, launch))
    for distance in range(1, group.world_size):
        peer = (group.rank + distance) % group.world_size
        if own.numel():
            messages.append(_send(own, peer, group, launch))
    return Handle(lambda _: buffer, messages, (buffer,))


def reduce_scatter_by_messages(
    buffer: Tensor,
    chunks: Sequence[Tensor],
    *,
    group: Group,
    op: Reduction,
    out: Tensor,
    launch: Launch,
) -> Handle[Tensor]:
    """Add this rank's chunk of every rank's buffer into `out`, which may be its own chunk."""
    own = chunks[group.rank]
    peers = [rank for rank in range(group.world_size) if rank != group.rank]
    if len(peers) == 1 and out.data_ptr() != own.data_ptr():
        scratch = {peers[0]: out}  # a sum of two does not depend on the order: receive in place
    else:
        rows = own.new_empty(len(peers), own.numel())
        scratch = {peer: rows[i] for i, peer in enumerate(peers)}

    step = max(1, PIECE_BYTES // buffer.element_size())
    arrivals: list[tuple[slice, list[Message]]] = []
    for start in range(0, own.numel(), step):
        piece = slice(start, min(start + step, own.numel()))
        messages = [_receive(scratch[peer][piece], peer, group, launch) for peer in peers]
        arrivals.append((piece, messages))
    sends = []
    for start in range(0, max(chunk.numel() for chunk in chunks), step):
        for peer in peers:
            piece = chunks[peer][start : start + step]
            if piece.numel():
                sends.append(_send(piece, peer, group, launch))

    def finish(timeout_s: float | None) -> Tensor:
        for piece, messages in arrivals:
            for message in messages:
                message.wait(timeout_s=timeout_s)
            rows = [
                own[piece] if rank == group.rank else scratch[rank][piece]
                for rank in range(group.world_size)
            ]
            # Partial sums go to memory of ours: `out` may be `own`, which must be read in its turn.
            partial = rows[0]
            for row in rows[1:-1]:
                partial = torch.add(partial, row, out=scratch[peers[0]][piece])
            total = torch.add(partial, rows[-1], out=out[piece])
            finish_mean(total, op=op, world_size=group.world_size)
        for message in sends:
            message.wait(timeout_s=timeout_s)
        return out

    received = [message for _, messages in arrivals for message in messages]
    return Handle(finish, (), (buffer, out, scratch), (*received, *sends))


def exchange_by_messages(
    buffer: Tensor, chunks: Sequence[Tensor], rows: list[Tensor], *, group: Group, launch: Launch
) -> Handle[list[Tensor]]:
    """Send every peer its chunk and receive in its row what it has for this rank."""
    messages = []
    for distance in range(1, group.world_size):
        peer = (group.rank - distance) % group.world_size
        if rows[peer].numel():
            messages.append(_receive(rows[peer], peer, group, launch))
    for distance in range(1, group.world_size):
        peer = (group.rank + distance) % group.world_size
        if chunks[peer].numel():
            messages.append(_send(chunks[peer], peer, group, launch))
    return Handle(lambda _: rows, messages, (buffer, rows))


def gather_to_by_messages(
    shard: Tensor,
    chunks: Sequence[Tensor],
    *,
    to: int,
    group: Group,
    launch: Launch | None,
) -> list[Message]:
    """Send to rank `to`, which has the chunks to receive in; empty ones do not travel."""
    if group.rank != to:
        return [_send(shard, to, group, launch)] if shard.numel() else []
    peers = [(to + distance) % group.world_size for distance in range(1, group.world_size)]
    return [_receive(chunks[peer], peer, group, launch) for peer in peers if chunks[peer].numel()]


def _send(tensor: Tensor, peer: int, group: Group, launch: Launch | None) -> Message:
    what = f"sending to rank {peer}"
    try:
        work = dist.isend(
            tensor, group.global_rank(peer), group=group.process_group, tag=_key(launch)
        )
    except RuntimeError as error:  # the connection is broken
        raise failure(f"{what} did not begin", error, launch) from error
    return Message(work, what, launch, peer)


def _receive(tensor: Tensor, peer: int, group: Group, launch: Launch | None) -> Message:
    what = f"receiving from rank {peer}"
    try:
        work = dist.irecv(
            tensor, group.global_rank(peer), group=group.process_group, tag=_key(launch)
        )
    except RuntimeError as error:
        raise failure(f"{what} did not begin", error, launch) from error
    return Message(work, what, launch, peer)


def _key(launch: Launch | None) -> int:
    """What a message carries; backends without a watch meet in the order of launches."""
    return 0 if launch is None else launch.key
