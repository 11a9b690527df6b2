"""Where tensors sit in one flat buffer, and which rank keeps what: arithmetic only."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from attrs import frozen

from ._errors import LayoutError
from ._span import Span


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
    def plan(cls, numels: Iterable[int], *, world_size: int, align: int = 16) -> FlatLayout:
        """Lay tensors end to end and cut anywhere: every rank keeps the same number of elements.

        Args:
            numels: Elements per tensor; zero is allowed.
            world_size: Number of shards.
            align: In elements; each tensor and each shard starts on a multiple of it. 64 bytes'
                worth keeps every view on the boundary that vector units and compiled kernels
                assume.

        Raises:
            LayoutError: A negative numel, or a world size or alignment below one.
        """
        spans, cursor = _lay_out(tuple(numels), world_size, align)
        cursor = _align_up(cursor, world_size * align)
        return cls._of(spans, [cursor // world_size * rank for rank in range(world_size)], cursor)

    @classmethod
    def plan_cut(
        cls,
        numels: Iterable[int],
        grains: Sequence[int],
        *,
        world_size: int,
        align: int = 16,
        loads: Sequence[float] | None = None,
    ) -> FlatLayout:
        """Lay tensors end to end and cut each where it may be cut, as evenly as that allows.

        Args:
            numels: As for `plan`.
            grains: Per tensor, elements from one place where it may be cut to the next, counted
                from its first. It may also be cut before and after.
            world_size: As for `plan`.
            align: In elements; each tensor starts on a multiple of it. Shards need not.
            loads: Elements each rank keeps elsewhere, which the cuts even out.

        Raises:
            LayoutError: As for `plan`, or a grain below one.
        """
        numels, loads = tuple(numels), [0.0] * world_size if loads is None else loads
        spans, cursor = _lay_out(numels, world_size, align)
        if len(grains) != len(numels) or any(grain < 1 for grain in grains):
            raise LayoutError(f"expected {len(numels)} grains of at least 1, got {tuple(grains)}")
        ends = accumulate(_fair_shares(cursor, loads))
        starts = [0]
        for ideal in list(ends)[:-1]:
            legal = _legal_cuts(ideal, spans, grains, cursor)
            nearest = min(legal, key=lambda place: abs(place - ideal))
            starts.append(max(starts[-1], nearest))
        return cls._of(spans, starts, cursor)

    @classmethod
    def plan_whole(
        cls, numels: Iterable[int], owners: Sequence[int], *, world_size: int, align: int = 16
    ) -> FlatLayout:
        """Lay tensors end to end and cut between them: each lies whole in its owner's shard.

        Args:
            numels: As for `plan`.
            owners: Per tensor, the rank that keeps it; ascending, since shards are in rank order.
            world_size: As for `plan`.
            align: In elements; each tensor and each shard starts on a multiple of it.

        Raises:
            LayoutError: As for `plan`, or owners that are no ascending ranks.
        """
        spans, cursor = _lay_out(tuple(numels), world_size, align)
        owners = tuple(owners)
        if len(owners) != len(spans) or any(
            a > b for a, b in pairwise((0, *owners, world_size - 1))
        ):
            raise LayoutError(
                f"expected {len(spans)} ascending ranks below {world_size}, got {owners}"
            )
        starts = [
            next((s.start for s, owner in zip(spans, owners, strict=True) if owner >= rank), cursor)
            for rank in range(1, world_size)
        ]
        return cls._of(spans, [0, *starts], cursor)

    @classmethod
    def _of(cls, spans: Sequence[Span], starts: Sequence[int], numel: int) -> FlatLayout:
        return _layout_of(tuple(spans), tuple(starts), numel)

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
        return self.payload_of(self.splits)

    @cached_property
    def gaps(self) -> tuple[Span, ...]:
        """What belongs to no tensor: padding, in order."""
        starts = (0, *(span.stop for span in self.spans))
        stops = (*(span.start for span in self.spans), self.numel)
        return tuple(Span(*ends) for ends in zip(starts, stops, strict=True) if ends[0] < ends[1])

    def payload_of(self, splits: Iterable[int], *, start: int = 0) -> tuple[int, ...]:
        """Elements that belong to a tensor, in chunks of these sizes that begin at `start`."""
        starts = [span.start for span in self.spans]
        before = [0, *accumulate(span.numel for span in self.spans)]

        def payload_before(place: int) -> int:
            index = bisect(starts, place) - 1  # of the last tensor that starts there or before
            if index < 0:
                return 0
            return before[index] + min(place - starts[index], self.spans[index].numel)

        places = accumulate(splits, initial=start)
        return tuple(right - left for left, right in pairwise(map(payload_before, places)))

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


@lru_cache(maxsize=16)  # blocks of a model are alike, and a plan has thousands of ranks for each
def _layout_of(spans: tuple[Span, ...], starts: tuple[int, ...], numel: int) -> FlatLayout:
    shards = tuple(Span(start, stop) for start, stop in pairwise((*starts, numel)))
    return FlatLayout(spans, shards, numel)


def byte_offsets(sizes: Iterable[int], *, align_bytes: int = 64) -> tuple[int, ...]:
    """Where buffers of these sizes start when laid end to end, and where the last one ends."""
    return tuple(accumulate((_align_up(size, align_bytes) for size in sizes), initial=0))


def _lay_out(numels: Sequence[int], world_size: int, align: int) -> tuple[list[Span], int]:
    if world_size < 1 or align < 1 or any(numel < 0 for numel in numels):
        raise LayoutError(
            f"expected world_size >= 1, align >= 1 and numels >= 0, got {world_size}, {align} "
            f"and a smallest numel of {min(numels, default=0)}"
        )
    spans, cursor = [], 0
    for numel in numels:
        spans.append(Span(cursor, cursor + numel))
        cursor = _align_up(cursor + numel, align)
    return spans, cursor


def _fair_shares(numel: int, loads: Sequence[float]) -> list[float]:
    """Of `numel` elements, how many each rank should get so that none has more than it must."""
    poorest = sorted(loads)
    for count in range(len(poorest), 0, -1):
        level = (numel + sum(poorest[:count])) / count
        if level >= poorest[count - 1]:
            break
    return [max(level - load, 0.0) for load in loads]


def _legal_cuts(
    ideal: float, spans: Sequence[Span], grains: Sequence[int], numel: int
) -> tuple[int, ...]:
    """The last place to cut at or before `ideal`, and the first one after."""
    index = max((i for i, span in enumerate(spans) if span.start <= ideal), default=None)
    if index is None:
        return (0,)
    span, after = spans[index], spans[index + 1].start if index + 1 < len(spans) else numel
    below = span.start + int(ideal - span.start) // grains[index] * grains[index]
    above = below + grains[index]
    if below >= span.stop:  # in the padding behind the tensor, which goes with its end
        return (after,)
    return below, above if above < span.stop else after


def _align_up(value: int, align: int) -> int:
    return -(-value // align) * align
