"""Collectives on a flat buffer that fits and is counted: the backend's own, or composed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from zero_comm.codecs.codec import AbstractCodec

from .errors import GroupMismatchError
from .group import Group
from .handle import Handle, Message, fail
from .messages import offset_of
from .planning import sent_flat
from .reduction import Reduction, torch_op
from .torch_private import all_gather_single, reduce_scatter_single
from .watch import Launch


def built_in(
    launch: Launch, start: Callable[..., Any], *args: Any, group: Group, peer: int = -1
) -> Message:
    """Begin a collective of the backend's own; `peer` is the rank that it waits for, if known."""
    try:
        work = start(*args, group=group.process_group, async_op=True)
    except Exception as error:
        # The launch failed by itself: peers need not be told that it was interrupted.
        launch.watch.sent()
        fail("the collective did not begin", error, launch, -1)
    launch.watch.sent()
    return Message(work, "the collective", launch, peer)


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
    """Record the traffic that an operation on this buffer asks this rank to send.

    It sends each peer this rank's chunk if `sends_own`, else the peer's chunk.
    """
    splits = tuple(splits)
    payload = splits if payload is None else tuple(payload)
    sent = (splits, payload, group.nodes, group.rank, sends_own, buffer.element_size(), codec)
    group.count(name, sent_flat, *sent, calls=calls, tag=tag)


# Tags far from those a user of torch's send and recv would choose on the same group: torch takes
# what is positive and has 31 bits.
_KEY_BASE: Final = 1 << 24
_NUM_KEYS: Final = (1 << 31) - _KEY_BASE
_NUM_VERSIONS: Final = 3  # versions are told apart modulo this


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
        return group.exchanges.exchange(
            buffer,
            buffer,
            sends=[own] * group.world_size,
            receives=chunks,
            offsets=[offset_of(chunk, buffer) for chunk in chunks],
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
        return group.exchanges.reduce_scatter(buffer, chunks, op=op, out=out, launch=launch)
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
    return group.exchanges.exchange(
        buffer,
        rows,
        sends=chunks,
        receives=rows,
        offsets=[offset_of(own, buffer)] * group.world_size,
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


# Cached, since every step has the same collectives.
@lru_cache(maxsize=8192)
def _key_of(*identity: Hashable) -> int:
    """Return a number that is the same in every process, and as a tag of torch's."""
    return _KEY_BASE + crc32(repr(identity).encode()) % _NUM_KEYS
