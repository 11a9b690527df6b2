"""Compositions of reads: each rank takes what it needs out of its peers' buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, TypeVar

import torch
from torch import Tensor

from ._handle import Handle
from ._peer_memory import PeerMemory
from ._reduction import Reduction, finish_mean
from ._transfer import RemoteBuffer, Transfer
from ._watch import Launch

T = TypeVar("T")

# A piece of every rank stays in cache until it is added.
_PIECE_BYTES: Final = 2**18


def gather_by_reading(
    buffer: Tensor, chunks: Sequence[Tensor], *, peers: PeerMemory, launch: Launch
) -> Handle[Tensor]:
    """Fill the peers' chunks of `buffer` from theirs."""
    offsets = [_offset(chunk, buffer) for chunk in chunks]

    def carry_out(buffers: dict[int, RemoteBuffer]) -> None:
        for distance in range(1, peers.world_size):  # the next rank first: no rank is a hot spot
            rank = (peers.rank + distance) % peers.world_size
            buffers[rank].read_into(chunks[rank], offset=offsets[rank])

    transfer = peers.launch(launch.key, buffer, carry_out, launch=launch)
    return Handle(partial(_finish, transfer, buffer, peers, launch.operation))


def gather_to_by_reading(
    shard: Tensor,
    out: Tensor | None,
    chunks: Sequence[Tensor],
    *,
    splits: Sequence[int],
    peers: PeerMemory,
    launch: Launch,
) -> Handle[Tensor | None]:
    """Fill the peers' chunks of `out`, where there is one, from their shards."""

    def carry_out(buffers: dict[int, RemoteBuffer]) -> None:
        if out is None:
            return
        for distance in range(1, peers.world_size):
            rank = (peers.rank + distance) % peers.world_size
            if chunks[rank].numel():
                buffers[rank].read_into(chunks[rank], offset=0)

    num_bytes = tuple(split * shard.element_size() for split in splits)
    transfer = peers.launch(launch.key, shard, carry_out, launch=launch, num_bytes=num_bytes)

    def finish(timeout_s: float | None) -> Tensor | None:
        peers.wait(transfer, launch.operation, timeout_s=timeout_s)
        return out

    return Handle(finish)


def reduce_scatter_by_reading(
    buffer: Tensor,
    chunks: Sequence[Tensor],
    *,
    peers: PeerMemory,
    op: Reduction,
    out: Tensor,
    launch: Launch,
) -> Handle[Tensor]:
    """Add this rank's chunk of every rank's buffer into `out`, which may be its own chunk."""
    rank, world_size = peers.rank, peers.world_size
    own = chunks[rank]
    offset = _offset(own, buffer)
    size = min(own.numel(), _PIECE_BYTES // buffer.element_size())

    def carry_out(buffers: dict[int, RemoteBuffer]) -> None:
        scratch = own.new_empty(2, size)  # in turns: one holds the partial sum
        for first in range(0, own.numel(), max(1, size)):
            piece = slice(first, min(first + size, own.numel()))
            numel = piece.stop - first
            total = own
            for other in range(world_size):
                row = target = scratch[other % 2, :numel]
                if other == rank:
                    row = own[piece]
                else:
                    buffers[other].read_into(row, offset=offset + first * buffer.element_size())
                if other == world_size - 1:  # only now: `out` may be `own`
                    target = out[piece]
                total = row if other == 0 else torch.add(total, row, out=target)
            finish_mean(total, op=op, world_size=world_size)

    transfer = peers.launch(launch.key, buffer, carry_out, launch=launch)
    return Handle(partial(_finish, transfer, out, peers, launch.operation))


def exchange_by_reading(
    buffer: Tensor,
    chunks: Sequence[Tensor],
    rows: list[Tensor],
    *,
    peers: PeerMemory,
    launch: Launch,
) -> Handle[list[Tensor]]:
    """Fill each peer's row with what it has for this rank."""
    offset = _offset(chunks[peers.rank], buffer)

    def carry_out(buffers: dict[int, RemoteBuffer]) -> None:
        for distance in range(1, peers.world_size):
            rank = (peers.rank + distance) % peers.world_size
            buffers[rank].read_into(rows[rank], offset=offset)

    transfer = peers.launch(launch.key, buffer, carry_out, launch=launch)
    return Handle(partial(_finish, transfer, rows, peers, launch.operation))


def _offset(chunk: Tensor, buffer: Tensor) -> int:
    """Bytes from the start of the buffer."""
    return int(chunk.storage_offset() - buffer.storage_offset()) * buffer.element_size()


def _finish(
    transfer: Transfer, result: T, peers: PeerMemory, what: str, timeout_s: float | None
) -> T:
    peers.wait(transfer, what, timeout_s=timeout_s)
    return result
