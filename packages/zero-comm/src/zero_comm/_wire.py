"""Pack a list of tensors into one wire buffer, so that they travel in one message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from ._errors import GroupMismatchError
from ._group import Group


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


@torch.no_grad()  # parameters may be packed
def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors of one dtype end to end into a new wire buffer."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1).clone()
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@torch.no_grad()  # parameters may be unpacked over
def unpack(wire: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a wire buffer back over the tensors it was packed from."""
    start = 0
    for tensor in tensors:
        tensor.copy_(wire[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()
