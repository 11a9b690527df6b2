"""Collectives on a flat buffer that fits and is counted: the backend's own, or composed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, Final, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from zero_comm.codecs.codec import AbstractCodec

from .errors import GroupMismatchError
from .group import Group
from .handle import Handle, Message, failure
from .peer_memory import PeerMemory, RemoteBuffer, Transfer
from .planning import sent_flat
from .torch_private import all_gather_single, is_profiled, reduce_scatter_single, unrecorded
from .watch import Launch


class Reduction(Enum):
    """MEAN is the sum divided by the world size, in that order."""

    MEAN = "mean"
    SUM = "sum"


def finish_mean(total: Tensor, *, op: Reduction, world_size: int) -> None:
    """Turn a sum over ranks into what `op` asks for, in place."""
    if op is Reduction.MEAN and world_size > 1:
        total.div_(world_size)


# Messages of this size let the local sum run while later messages arrive, and stay in cache for
# it. Between 512 KiB and 8 MiB the time hardly changes (benchmarks/run.py collectives).
_MESSAGE_BYTES: Final = 2 * 2**20
_READ_BYTES: Final = 2**18  # a piece of every rank stays in cache until it is added

T = TypeVar("T")


def exchange(
    buffer: Tensor,
    result: T,
    *,
    sends: Sequence[Tensor],
    receives: Sequence[Tensor],
    group: Group,
    launch: Launch,
    offsets: Sequence[int] = (),
) -> Handle[T]:
    """Send each rank a part of `buffer`, and receive from each; empty tensors do not travel.

    Args:
        buffer: What peers read, where ranks read each other's memory.
        result: What the handle is of.
        sends: For each rank, what it is sent.
        receives: For each rank, what is filled with what it sends; may be empty where none does.
        group: The ranks that take part.
        launch: This collective.
        offsets: Where that lies in each rank's buffer, in bytes.
    """
    rank, world_size = group.rank, group.world_size
    # The next rank first: no rank is a hot spot.
    others = [(rank + distance) % world_size for distance in range(1, world_size)]
    peers = group.peers
    # A message reaches its peer even if this rank ends before it is read: what controls must.
    if peers is None or launch.operation == "agree":
        received = [peer for peer in reversed(others) if receives and receives[peer].numel()]
        messages = [_message(receives[peer], peer, group, launch) for peer in received]
        sent = [peer for peer in others if sends[peer].numel()]
        messages += [_message(sends[peer], peer, group, launch, is_sent=True) for peer in sent]
        launch.watch.sent()
        return Handle(lambda _: result, messages, (buffer, result))

    def carry_out(buffers: dict[int, RemoteBuffer]) -> None:
        for peer in others if receives else ():
            buffers[peer].read_into(receives[peer], offset=offsets[peer])

    transfer = peers.launch(launch.key, buffer, carry_out, launch=launch)
    launch.watch.sent()
    return _when_read(transfer, result, peers, launch)


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

    step = max(1, _MESSAGE_BYTES // buffer.element_size())
    arrivals: list[tuple[slice, list[Message]]] = []
    for start in range(0, own.numel(), step):
        piece = slice(start, min(start + step, own.numel()))
        messages = [_message(scratch[peer][piece], peer, group, launch) for peer in peers]
        arrivals.append((piece, messages))
    sends = []
    for start in range(0, max(chunk.numel() for chunk in chunks), step):
        for peer in peers:
            piece = chunks[peer][start : start + step]
            if piece.numel():
                sends.append(_message(piece, peer, group, launch, is_sent=True))
    launch.watch.sent()

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


def _message(
    tensor: Tensor, peer: int, group: Group, launch: Launch, *, is_sent: bool = False
) -> Message:
    what = f"{'sending to' if is_sent else 'receiving from'} rank {peer}"
    start: Any = dist.isend if is_sent else dist.irecv
    if is_profiled():
        start = partial(unrecorded, start)
    try:
        work = start(tensor, group.global_rank(peer), group=group.process_group, tag=launch.key)
    except RuntimeError as error:  # the connection is broken
        launch.watch.sent()  # nobody has interrupted this rank
        raise failure(f"{what} did not begin", error, launch, peer) from error
    return Message(work, what, launch, peer)


def built_in(launch: Launch, start: Callable[..., Any], *args: Any, group: Group) -> Message:
    """Begin a collective of the backend's own."""
    try:
        work = start(*args, group=group.process_group, async_op=True)
    except Exception as error:
        launch.watch.sent()  # nobody has interrupted this rank
        raise failure("the collective did not begin", error, launch, -1) from error
    launch.watch.sent()
    return Message(work, "the collective", launch)


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
    size = min(own.numel(), _READ_BYTES // buffer.element_size())

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
    launch.watch.sent()
    return _when_read(transfer, out, peers, launch)


def _offset(chunk: Tensor, buffer: Tensor) -> int:
    """Bytes from the start of the buffer."""
    return int(chunk.storage_offset() - buffer.storage_offset()) * buffer.element_size()


def _when_read(transfer: Transfer, result: T, peers: PeerMemory, launch: Launch) -> Handle[T]:
    def finish(timeout_s: float | None) -> T:
        peers.wait(transfer, launch.operation, timeout_s=timeout_s)
        return result

    return Handle(finish)


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
    splits = tuple(splits)
    payload = splits if payload is None else tuple(payload)
    sent = (splits, payload, group.nodes, group.rank, sends_own, buffer.element_size(), codec)
    group.count(name, sent_flat, *sent, calls=calls, tag=tag)


# Tags far from those a user of torch's send and recv would choose on the same group: torch takes
# what is positive and has 31 bits.
_KEY_BASE: Final = 1 << 24
_NUM_KEYS: Final = (1 << 31) - _KEY_BASE
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
    if group.world_size == 1:
        return Handle(lambda _: buffer)
    chunks = chunks_of(buffer, splits)
    own = chunks[group.rank]
    launch = begin(group, name, tag, buffer.dtype, splits, version=version, is_late=is_late)
    if group.backend.composes_from_peers:
        return exchange(
            buffer,
            buffer,
            sends=[own] * group.world_size,
            receives=chunks,
            offsets=[_offset(chunk, buffer) for chunk in chunks],
            group=group,
            launch=launch,
        )
    if len(set(splits)) == 1:
        message = built_in(launch, all_gather_single, buffer, own, group=group)
    else:
        message = built_in(launch, dist.all_gather, chunks, own, group=group)
    return Handle(lambda _: buffer, (message,), (buffer,))


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
    launch = begin(group, "reduce_scatter", tag, buffer.dtype, splits)
    if group.backend.composes_from_peers:
        peers = group.peers
        if peers is None:
            return reduce_scatter_by_messages(
                buffer, chunks, group=group, op=op, out=out, launch=launch
            )
        return reduce_scatter_by_reading(buffer, chunks, peers=peers, op=op, out=out, launch=launch)
    reduce_op = torch_op(op)
    if len(set(splits)) == 1:
        message = built_in(launch, reduce_scatter_single, out, buffer, reduce_op, group=group)
    else:
        message = built_in(launch, dist.reduce_scatter, out, chunks, reduce_op, group=group)
    return Handle(lambda _: out, (message,), (buffer, out))


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
    launch = begin(group, name, tag, buffer.dtype, splits, is_late=is_late)
    if not group.backend.composes_from_peers:
        message = built_in(launch, dist.all_to_all, rows, chunks, group=group)
        return Handle(lambda _: rows, (message,), (buffer, rows))
    rows[group.rank] = own
    return exchange(
        buffer,
        rows,
        sends=chunks,
        receives=rows,
        offsets=[_offset(own, buffer)] * group.world_size,
        group=group,
        launch=launch,
    )


def begin(
    group: Group,
    name: str,
    tag: int,
    dtype: torch.dtype,
    splits: Sequence[int],
    *,
    version: int | None = None,
    is_late: bool = False,
) -> Launch:
    """Count a collective of several ranks; its key tells it from all that mean something else.

    What is launched in `wait` is late: ranks may wait before or after they launch something else.
    """
    assert group.watch is not None, "a group of several ranks has a watch"
    part = 0 if version is None else 1 + version % _NUM_VERSIONS
    key = _key_of(name, tag, dtype, tuple(splits), part, is_late)
    shape = (dtype, splits)
    return group.watch.launch(name, key, tag=tag, version=version, shape=shape, sends=True)


@lru_cache(maxsize=8192)  # the same collectives come again in every step
def _key_of(*identity: Hashable) -> int:
    """Return a number that is the same in every process, and as a tag of torch's."""
    return _KEY_BASE + crc32(repr(identity).encode()) % _NUM_KEYS


def torch_op(op: Reduction) -> Any:
    """Torch's name of a reduction."""
    return dist.ReduceOp.AVG if op is Reduction.MEAN else dist.ReduceOp.SUM
