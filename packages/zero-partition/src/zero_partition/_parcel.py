"""Tensors that travel together, each from the one rank that has it to the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import frozen
from torch import Tensor

from ._buffer_plan import ALIGN_BYTES
from ._layout import FlatLayout
from ._span import Span

PARCEL_BYTES = 32 * 2**20  # what is packed together; a larger tensor is a parcel of its own


@frozen
class Parcel:
    """Which tensors travel, in the order of their owners, and where their bytes lie."""

    positions: tuple[int, ...]  # in the list of tensors that was planned
    owners: tuple[int, ...]  # ascending ranks
    layout: FlatLayout  # in bytes

    @classmethod
    def plan(
        cls,
        positions: Sequence[int],
        sizes: Sequence[int],
        owners: Sequence[int],
        *,
        world_size: int,
    ) -> Parcel:
        """All of these in one.

        Args:
            positions: Which of the tensors.
            sizes: Bytes of every tensor.
            owners: The rank that has each tensor.
            world_size: Of the group.
        """
        positions = sorted(positions, key=lambda position: owners[position])  # stable
        ranks = [owners[position] for position in positions]
        numels = [sizes[position] for position in positions]
        layout = FlatLayout.plan_whole(numels, ranks, world_size=world_size, align=ALIGN_BYTES)
        return cls(tuple(positions), tuple(ranks), layout)

    def places(self) -> Iterator[tuple[int, int, Span]]:
        """Each tensor's position, its owner, and the bytes it has in the buffer."""
        return zip(self.positions, self.owners, self.layout.spans, strict=True)


def plan_parcels(
    sizes: Sequence[int], owners: Sequence[int], *, world_size: int, limit: int = PARCEL_BYTES
) -> tuple[Parcel, ...]:
    """Deal tensors into parcels, in each of which every rank has about as much to send.

    Args:
        sizes: Bytes of each tensor.
        owners: The rank that has each tensor.
        world_size: Of the group.
        limit: In bytes; no parcel of several tensors is larger.
    """
    totals, so_far, progress = [0] * world_size, [0] * world_size, []
    for size, owner in zip(sizes, owners, strict=True):
        totals[owner] += size
    for size, owner in zip(sizes, owners, strict=True):
        progress.append(so_far[owner] / max(totals[owner], 1))
        so_far[owner] += size
    dealt: list[list[int]] = []
    room = -1
    for position in sorted(range(len(sizes)), key=progress.__getitem__):
        if sizes[position] > room:
            dealt.append([])
            room = limit
        dealt[-1].append(position)
        room -= sizes[position]
    return tuple(Parcel.plan(each, sizes, owners, world_size=world_size) for each in dealt)


def size_of(tensor: Tensor) -> int:
    """Bytes of its elements."""
    return tensor.numel() * tensor.element_size()


def seen_as(bytes_: Tensor, span: Span, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """These bytes of a buffer as a contiguous tensor."""
    return bytes_[span.as_slice()].view(dtype).view(shape)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements, 1-D; its own memory where it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
