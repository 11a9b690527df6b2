"""Collectives on a flat buffer that fits and is counted: the backend's own, or composed."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zero_comm.codecs.codec import AbstractCodec

from .errors import GroupMismatchError
from .group import Group
from .handle import Handle, Message, failure
from .peer_memory import PeerMemory, RemoteBuffer, Transfer
from .torch_private import all_gather_single, reduce_scatter_single
from .traffic import sent_of
from .watch import Launch, Watch


class Reduction(Enum):
    """MEAN is the sum divided by the world size, in that order."""

    MEAN = "mean"
    SUM = "sum"


def finish_mean(total: Tensor, *, op: Reduction, world_size: int) -> None:
    """Turn a sum over ranks into what `op` asks for, in place."""
    if op is Reduction.MEAN and world_size > 1:
        total.div_(world_size)


# ---- Compositions of sends and receives between every two ranks ----


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


# ---- Compositions of reads: each rank takes what it needs out of its peers' buffers ----


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


# ---- A flat buffer cut into one chunk per rank: what fits it, and what of it a rank sends ----


def even_splits(numel: int, world_size: int) -> tuple[int, ...]:
    """Cut `numel` elements into chunks that differ by one at most."""
    quotient, rest = divmod(numel, world_size)
    return tuple(quotient + (rank < rest) for rank in range(world_size))


def chunks_of(buffer: Tensor, splits: Sequence[int]) -> list[Tensor]:
    """A flat buffer, cut as the splits say."""
    return [buffer[start:stop] for start, stop in pairwise(accumulate(splits, initial=0))]


def own_chunk(buffer: Tensor, splits: Sequence[int], group: Group) -> Tensor:
    """This rank's chunk of a buffer that fits the splits, or else GroupMismatchError."""
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


def check_mean(buffer: Tensor, op: Reduction, group: Group) -> None:
    """Raise GroupMismatchError if its values have none and one is asked for."""
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
    codec: AbstractCodec | None = None,
) -> None:
    """Tell whoever records traffic what an operation on this buffer asks this rank to send.

    To each peer, that is its own chunk, or the peer's.
    """
    if not group.is_counted:
        return
    inside, across = sent_of(
        splits,
        payload,
        rank=group.rank,
        sends_own=sends_own,
        itemsize=buffer.element_size(),
        codec=codec,
        nodes=group.nodes,
    )
    group.count(name, inside=inside, across=across, calls=calls, tag=tag)


# ---- Collectives on a flat buffer that fits and is counted: the backend's own, or composed ----


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
