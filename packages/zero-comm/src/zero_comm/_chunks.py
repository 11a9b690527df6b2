"""A flat buffer cut into one chunk per rank: what fits it, and what of it a rank sends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ._codec import AbstractCodec
from ._errors import GroupMismatchError
from ._group import Group
from ._reduction import Reduction
from ._sent import sent_of


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
