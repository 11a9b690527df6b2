"""Where tensors sit in one flat buffer, and which rank keeps what: arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import cached_property
from itertools import accumulate, pairwise

from attrs import frozen

from ._errors import LayoutError
from ._span import Span


class Cut(Enum):
    """Where a flat buffer may be cut into shards."""

    FLAT = (
        "flat"  # anywhere, on multiples of `align`: even shards, right for elementwise optimizers
    )
    TENSOR = "tensor"  # only between tensors: uneven shards, for optimizers that need whole tensors


@frozen
class Piece:
    """The part of one tensor that lies in one rank's shard."""

    index: int  # which tensor
    in_tensor: Span  # seen from the tensor's first element
    in_shard: Span  # seen from the shard's first element


@frozen
class FlatLayout:
    """Where tensors sit in one flat buffer, and which rank keeps what."""

    spans: tuple[Span, ...]  # one per tensor, in the order given
    shards: tuple[Span, ...]  # one per rank, in rank order, covering the buffer; may be empty
    numel: int  # payload and padding

    @classmethod
    def plan(
        cls,
        numels: Iterable[int],
        *,
        world_size: int,
        align: int = 16,
        cut: Cut = Cut.FLAT,
    ) -> FlatLayout:
        """Lay tensors end to end, each starting on a multiple of `align` elements.

        Args:
            numels: Elements per tensor; zero is allowed.
            world_size: Number of shards.
            align: In elements. 64 bytes' worth keeps every view on the boundary that vector units
                and compiled kernels assume.
            cut: FLAT pads to `world_size * align` and cuts evenly. TENSOR cuts at the tensor
                boundary nearest to each even cut; what a rank keeps is then uneven.

        Raises:
            LayoutError: A negative numel, or a world size or alignment below one.
        """
        numels = tuple(numels)
        if world_size < 1 or align < 1 or any(numel < 0 for numel in numels):
            raise LayoutError(
                f"expected world_size >= 1, align >= 1 and numels >= 0, got {world_size}, {align} "
                f"and a smallest numel of {min(numels, default=0)}"
            )
        spans, cursor = [], 0
        for numel in numels:
            spans.append(Span(cursor, cursor + numel))
            cursor = _align_up(cursor + numel, align)
        if cut is Cut.FLAT:
            cursor = _align_up(cursor, world_size * align)
            ends = [cursor // world_size * rank for rank in range(world_size + 1)]
        else:
            starts = [span.start for span in spans] + [cursor]
            ends = [0]
            for rank in range(1, world_size):
                ideal = cursor * rank / world_size
                nearest = min(starts, key=lambda start: abs(start - ideal))
                ends.append(max(ends[-1], nearest))
            ends.append(cursor)
        shards = tuple(Span(start, stop) for start, stop in pairwise(ends))
        return cls(tuple(spans), shards, cursor)

    @cached_property
    def splits(self) -> tuple[int, ...]:
        """Elements per rank, padding included, in rank order."""
        return tuple(shard.numel for shard in self.shards)

    @cached_property
    def payload_numel(self) -> int:
        """Elements that belong to a tensor."""
        return sum(span.numel for span in self.spans)

    @cached_property
    def payload_splits(self) -> tuple[int, ...]:
        """Elements per rank that belong to a tensor."""
        return tuple(
            sum(piece.in_tensor.numel for piece in self.pieces(rank))
            for rank in range(len(self.shards))
        )

    def shard(self, rank: int) -> Span:
        """The span that `rank` keeps."""
        return self.shards[rank]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` keeps of each tensor that it has a part of, in the order of the tensors."""
        shard = self.shards[rank]
        return tuple(
            Piece(index, part.shifted(-span.start), part.shifted(-shard.start))
            for index, span in enumerate(self.spans)
            if (part := span.overlap(shard)) is not None
        )


def byte_offsets(sizes: Iterable[int], *, align_bytes: int = 64) -> tuple[int, ...]:
    """Where buffers of these sizes start when laid end to end, and where the last one ends."""
    return tuple(accumulate((_align_up(size, align_bytes) for size in sizes), initial=0))


def _align_up(value: int, align: int) -> int:
    return -(-value // align) * align
