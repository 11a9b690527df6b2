"""Collectives on lists of tensors: one message per dtype, whatever the sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from zero_comm.codecs.codec import AbstractCodec, check_encodable

from .errors import GroupMismatchError
from .flat import all_gather_flat, all_reduce_flat, broadcast_flat, reduce_scatter_flat
from .group import Group
from .handle import Handle
from .reduction import Reduction


def check_list(tensors: Sequence[Tensor], group: Group) -> None:
    """Raise unless every tensor is contiguous, dense and on the group's device."""
    for index, tensor in enumerate(tensors):
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise GroupMismatchError(
                f"tensor {index}: expected a dense contiguous tensor, got layout {tensor.layout} "
                f"with strides {tensor.stride() if tensor.layout == torch.strided else None} "
                f"(rank {group.rank}); pass tensor.contiguous()"
            )
        if tensor.device != group.device:
            raise GroupMismatchError(
                f"tensor {index}: expected it on {group.device}, where this group communicates, "
                f"got {tensor.device} (rank {group.rank})"
            )


def by_dtype(tensors: Sequence[Tensor]) -> Iterator[tuple[torch.dtype, list[int]]]:
    """Indices of the tensors of each dtype, in the order given. One wire buffer each."""
    order = sorted(range(len(tensors)), key=lambda i: (str(tensors[i].dtype), i))
    for _, indices in groupby(order, key=lambda i: str(tensors[i].dtype)):
        chosen = list(indices)
        yield tensors[chosen[0]].dtype, chosen


# Neither `pack` nor `unpack` records gradients: the tensors may be parameters.
@torch.no_grad()
def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors of one dtype end to end into a new wire buffer."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1).clone()
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@torch.no_grad()
def unpack(wire: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a wire buffer back over the tensors it was packed from."""
    start = 0
    for tensor in tensors:
        tensor.copy_(wire[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


def all_gather_coalesced(
    shards: Sequence[Tensor],
    *,
    group: Group,
    out: Sequence[Tensor] | None = None,
    codec: AbstractCodec | None = None,
) -> Handle[list[Tensor]]:
    """Concatenate every rank's shard of each tensor, in rank order. Collective.

    Returns at once; `Handle.wait()` blocks.

    Args:
        shards: Contiguous, on the group's device, any mix of sizes and dtypes; flattened. The same
            sizes and dtypes in the same order on every rank. Copied before this returns.
        group: The ranks that take part.
        out: 1-D tensors to fill, `world_size` times as long as their shard; allocated when None.
        codec: As for `all_gather_flat`, of all shards of a dtype end to end.

    Returns:
        Handle of one 1-D tensor per shard.

    Raises:
        GroupMismatchError: A tensor is on another device, not contiguous, or `out` does not fit.
        CodecError: The codec does not take the dtype of one.
    """
    check_list(shards, group)
    check_encodable(shards, codec)
    numels = [shard.numel() for shard in shards]
    full = _outputs(shards, out, group, numels=[numel * group.world_size for numel in numels])
    handles = []
    for dtype, chosen in by_dtype(shards):
        sent = pack([shards[i] for i in chosen])
        wire = torch.empty(sent.numel() * group.world_size, dtype=dtype, device=group.device)
        splits = [sent.numel()] * group.world_size
        handle = all_gather_flat(wire, splits=splits, group=group, shard=sent, codec=codec)
        handles.append((handle, chosen))

    def finish(timeout_s: float | None) -> list[Tensor]:
        for handle, chosen in handles:
            rows = handle.wait(timeout_s=timeout_s).chunk(group.world_size)
            for rank in range(group.world_size):
                parts = [full[i][rank * numels[i] : (rank + 1) * numels[i]] for i in chosen]
                unpack(rows[rank], parts)
        return full

    return Handle(finish, inside=[handle for handle, _ in handles])


def reduce_scatter_coalesced(
    tensors: Sequence[Tensor],
    *,
    group: Group,
    op: Reduction = Reduction.MEAN,
    out: Sequence[Tensor] | None = None,
    codec: AbstractCodec | None = None,
) -> Handle[list[Tensor]]:
    """Combine each tensor over the ranks and keep this rank's shard of it. Collective.

    Returns at once; `Handle.wait()` blocks. Sums are taken in rank order on gloo.

    Args:
        tensors: Contiguous, on the group's device, any mix of sizes and dtypes; numel a multiple
            of the world size. Copied before this returns, never written.
        group: The ranks that take part.
        op: MEAN or SUM.
        out: 1-D tensors to fill, `numel // world_size` long; allocated when None.
        codec: As for `reduce_scatter_flat`, of all that goes to one rank in one dtype.

    Returns:
        Handle of one 1-D shard per tensor.

    Raises:
        GroupMismatchError: A numel does not divide by the world size, or a tensor does not fit.
        CodecError: The codec does not take the dtype of one.
    """
    check_list(tensors, group)
    check_encodable(tensors, codec)
    for index, tensor in enumerate(tensors):
        if tensor.numel() % group.world_size:
            raise GroupMismatchError(
                f"tensor {index}: expected a numel divisible by world size {group.world_size}, got "
                f"{tensor.numel()} (rank {group.rank}); pad it, or use reduce_scatter_flat() with "
                "uneven splits"
            )
    numels = [tensor.numel() // group.world_size for tensor in tensors]
    shards = _outputs(tensors, out, group, numels=numels)
    handles = []
    for _, chosen in by_dtype(tensors):
        rows = [tensors[i].detach().view(group.world_size, numels[i]) for i in chosen]
        # In the wire buffer, the parts of all tensors for one rank are contiguous.
        wire = torch.cat(rows, dim=1).view(-1)
        splits = [wire.numel() // group.world_size] * group.world_size
        handle = reduce_scatter_flat(wire, splits=splits, group=group, op=op, codec=codec)
        handles.append((handle, chosen))

    def finish(timeout_s: float | None) -> list[Tensor]:
        for handle, chosen in handles:
            unpack(handle.wait(timeout_s=timeout_s), [shards[i] for i in chosen])
        return shards

    return Handle(finish, inside=[handle for handle, _ in handles])


def all_reduce_coalesced(
    tensors: Sequence[Tensor], *, group: Group, op: Reduction = Reduction.MEAN
) -> Handle[list[Tensor]]:
    """Replace each tensor by its mean or sum over the ranks, in place. Collective.

    Args:
        tensors: Contiguous, on the group's device, any mix of sizes and dtypes; the same on every
            rank. Written when the handle is waited on.
        group: The ranks that take part.
        op: MEAN or SUM.

    Returns:
        Handle of the same tensors.

    Raises:
        GroupMismatchError: A tensor is on another device or not contiguous.
    """
    check_list(tensors, group)
    handles = [
        (all_reduce_flat(pack([tensors[i] for i in chosen]), group=group, op=op), chosen)
        for _, chosen in by_dtype(tensors)
    ]
    return _unpack_when_done(handles, tensors)


def broadcast_coalesced(
    tensors: Sequence[Tensor], *, group: Group, src: int = 0
) -> Handle[list[Tensor]]:
    """Give every rank the tensors of position `src` of the group, in place. Collective.

    Args:
        tensors: Contiguous, on the group's device, any mix of sizes and dtypes; the same sizes and
            dtypes on every rank. Written when the handle is waited on.
        group: The ranks that take part.
        src: Position in the group, not in the job.

    Returns:
        Handle of the same tensors.

    Raises:
        GroupMismatchError: `src` is no rank of the group, or a tensor does not fit.
    """
    check_list(tensors, group)
    handles = [
        (broadcast_flat(pack([tensors[i] for i in chosen]), src=src, group=group), chosen)
        for _, chosen in by_dtype(tensors)
    ]
    return _unpack_when_done(handles, tensors)


def _unpack_when_done(
    handles: Sequence[tuple[Handle[Tensor], list[int]]], tensors: Sequence[Tensor]
) -> Handle[list[Tensor]]:
    def finish(timeout_s: float | None) -> list[Tensor]:
        for handle, chosen in handles:
            unpack(handle.wait(timeout_s=timeout_s), [tensors[i] for i in chosen])
        return list(tensors)

    return Handle(finish, (), tensors)


def _outputs(
    tensors: Sequence[Tensor],
    out: Sequence[Tensor] | None,
    group: Group,
    *,
    numels: Sequence[int],
) -> list[Tensor]:
    expected = [((numel,), tensor.dtype) for numel, tensor in zip(numels, tensors, strict=True)]
    if out is None:
        return [torch.empty(shape, dtype=dtype, device=group.device) for shape, dtype in expected]
    given = [(tuple(tensor.shape), tensor.dtype) for tensor in out]
    if given != expected:
        raise GroupMismatchError(
            f"expected out to be 1-D tensors of {expected}, got {given} (rank {group.rank})"
        )
    check_list(out, group)
    return list(out)
