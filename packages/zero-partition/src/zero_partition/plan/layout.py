"""Layout of tensors in one flat buffer, and of the buffer in shards: arithmetic only."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import torch
from attrs import field, frozen
from attrs.validators import ge
from torch import Tensor, nn

from zero_partition.errors import LayoutError

from .cuts import Cut
from .slots import Extent
from .stages import Placement

T = TypeVar("T")


@frozen(order=True)
class Span:
    """Elements `start` up to, not including, `stop`."""

    start: int = field(validator=ge(0))
    stop: int = field()

    @stop.validator
    def _check_stop(self, _: object, stop: int) -> None:
        if stop < self.start:
            raise ValueError(f"expected stop >= start, got [{self.start}, {stop})")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def overlap(self, other: Span) -> Span | None:
        """Return the elements in both; None if there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    def shifted(self, offset: int) -> Span:
        """Return the same elements counted from another origin: `offset` is added."""
        return Span(self.start + offset, self.stop + offset)

    def as_slice(self) -> slice:
        """Return the slice that selects these elements of a 1-D tensor."""
        return slice(self.start, self.stop)


@frozen
class Piece:
    """The part of one tensor that lies in one rank's shard."""

    # Index of the tensor.
    index: int
    # Its elements in this shard, counted from the tensor's first one, and from the shard's.
    in_tensor: Span
    in_shard: Span


@frozen
class FlatLayout:
    """Layout of tensors in one flat buffer, and of the buffer in shards, one per rank."""

    # One per tensor, in the order given.
    spans: tuple[Span, ...]
    # One per rank, in rank order, covering the buffer; some may be empty.
    shards: tuple[Span, ...]
    # Payload and padding.
    numel: int

    @classmethod
    def plan(cls, numels: Iterable[int], *, world_size: int, align: int = 16) -> FlatLayout:
        """Lay tensors end to end and cut anywhere: each rank keeps the same number of elements.

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
        return _layout_of(
            spans, tuple(cursor // world_size * rank for rank in range(world_size)), cursor
        )

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
            loads: Elements that each rank keeps in other layouts; the cuts make the sums even.

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
        return _layout_of(spans, tuple(starts), cursor)

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
        return _layout_of(spans, (0, *starts), cursor)

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
        """Padding: spans that belong to no tensor, in order."""
        starts = (0, *(span.stop for span in self.spans))
        stops = (*(span.start for span in self.spans), self.numel)
        return tuple(Span(*ends) for ends in zip(starts, stops, strict=True) if ends[0] < ends[1])

    def payload_of(self, splits: Iterable[int], *, start: int = 0) -> tuple[int, ...]:
        """Return how many elements of each chunk belong to a tensor.

        Chunks have the sizes `splits` and follow each other; the first begins at `start`.
        """
        starts = [span.start for span in self.spans]
        before = [0, *accumulate(span.numel for span in self.spans)]

        def payload_before(place: int) -> int:
            # Index of the last tensor that starts at `place` or before.
            index = bisect(starts, place) - 1
            if index < 0:
                return 0
            return before[index] + min(place - starts[index], self.spans[index].numel)

        places = accumulate(splits, initial=start)
        return tuple(right - left for left, right in pairwise(map(payload_before, places)))

    def shard(self, rank: int) -> Span:
        """The span that `rank` keeps."""
        return self.shards[rank]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the parts of tensors in the shard of `rank`, in the order of the tensors."""
        shard = self.shards[rank]
        return tuple(
            Piece(index, part.shifted(-span.start), part.shifted(-shard.start))
            for index, span in enumerate(self.spans)
            if (part := span.overlap(shard)) is not None
        )


# Blocks of a model are alike, and a plan has thousands of ranks for each.
@lru_cache(maxsize=16)
def _layout_of(spans: tuple[Span, ...], starts: tuple[int, ...], numel: int) -> FlatLayout:
    shards = tuple(Span(start, stop) for start, stop in pairwise((*starts, numel)))
    return FlatLayout(spans, shards, numel)


def _lay_out(numels: Sequence[int], world_size: int, align: int) -> tuple[tuple[Span, ...], int]:
    if world_size < 1 or align < 1 or any(numel < 0 for numel in numels):
        raise LayoutError(
            f"expected world_size >= 1, align >= 1 and numels >= 0, got {world_size}, {align} "
            f"and a smallest numel of {min(numels, default=0)}"
        )
    spans, cursor = [], 0
    for numel in numels:
        spans.append(Span(cursor, cursor + numel))
        cursor = _align_up(cursor + numel, align)
    return tuple(spans), cursor


def _fair_shares(numel: int, loads: Sequence[float]) -> list[float]:
    """Divide `numel` elements among ranks so that the largest load is as small as possible.

    Returns elements per rank, maybe fractions; `loads` are elements that each rank has already.
    """
    poorest = sorted(loads)
    # Levels to which the `count` smallest loads could be raised, by count. The right one is that of
    # the largest count of which no load is above it.
    levels = [(numel + total) / count for count, total in enumerate(accumulate(poorest), 1)]
    level = next(
        level for level, load in zip(levels[::-1], poorest[::-1], strict=True) if level >= load
    )
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
    if below >= span.stop:
        # The padding after a tensor is in the shard of the tensor's end.
        return (after,)
    return below, above if above < span.stop else after


def _align_up(value: int, align: int) -> int:
    return -(-value // align) * align


def in_batches(
    items: Iterable[T], bytes_of: Callable[[T], int], *, max_bytes: int
) -> Iterator[list[T]]:
    """Cut a list where a batch would grow beyond `max_bytes`; what is larger goes alone."""
    batch: list[T] = []
    total = 0
    for item in items:
        num_bytes = bytes_of(item)
        if batch and total + num_bytes > max_bytes:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += num_bytes
    if batch:
        yield batch


def give_whole(sizes: Sequence[int], loads: list[int]) -> tuple[int, ...]:
    """Assign each size to one rank: largest first, to the least loaded (LPT; Graham, 1969).

    Returns the rank of each size.

    No rank ends with more than the least loaded one has, plus one size; equal sizes go to ranks in
    turn, so that the parameters of one unit spread.

    Args:
        sizes: In bytes.
        loads: Bytes that each rank has so far; what it is given is added.
    """
    ranks = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = min(range(len(loads)), key=loads.__getitem__)
        loads[rank] += sizes[index]
        ranks[index] = rank
    return tuple(ranks)


# Alignment that vector units and compiled kernels assume; without it, inputs are copied.
ALIGN_BYTES = 64

# NOTE(whole): shards are in rank order, so a flat buffer of tensors that are never cut has them in
# the order of the ranks that keep them. These ranks are chosen for all units together, the largest
# tensors first: a unit with one large matrix gives it to one rank, and the next unit's goes to
# another. A buffer of parameters that may be cut anywhere is cut evenly, whatever else there is,
# since backends send equal shards fastest.

# What may be cut stays with what may not if it has at most 1/4 of the elements.
_JOINS_WHOLE = 4


@frozen
class ParameterPlan:
    """One parameter: every name it goes by, and the tensor it is."""

    # Tied parameters have several; messages have the first.
    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    trainable: bool
    cut: Cut = Cut.FLAT
    # Strides of the user's tensor; None: those of a contiguous one.
    strides: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def memory_format(self) -> torch.memory_format | None:
        """Return the memory format of a channels-last convolution weight; None for others."""
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        if self.strides is None or len(self.shape) not in formats:
            return None
        found = formats[len(self.shape)]
        like = torch.empty(self.shape, device="meta").to(memory_format=found)
        return found if like.stride() == self.strides else None

    def as_given(self, value: Tensor) -> Tensor:
        """Return a copy with the user's strides."""
        if self.strides is None:
            return value.clone(memory_format=torch.contiguous_format)
        given = torch.empty_strided(
            self.shape, self.strides, dtype=value.dtype, device=value.device
        )
        return given.copy_(value)


def strides_of(param: Tensor) -> tuple[int, ...] | None:
    """Return the strides of a dense tensor; None where they are those of a contiguous one."""
    strides = param.stride()
    usual = torch.empty(param.shape, device="meta").stride()
    is_dense = sum((s - 1) * d for s, d in zip(param.shape, strides, strict=True)) < param.numel()
    return strides if strides != usual and is_dense else None


@frozen
class BufferPlan:
    """One flat buffer: parameters of a unit with the same dtypes, all trainable or all frozen.

    Parameters that may not be cut are in another buffer than large ones that may; see NOTE(whole).
    """

    params: tuple[ParameterPlan, ...]
    layout: FlatLayout
    dtype: torch.dtype
    trainable: bool
    # Dtype between ranks, if another one was asked for.
    travel: torch.dtype | None = None
    # Pattern in PartitionConfig.groups that has its ranks; "": the ranks of the model.
    ranks: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole buffer, padding included."""
        return self.layout.numel * self.dtype.itemsize

    @property
    def is_one_param(self) -> bool:
        """Return whether one contiguous parameter is all of it, so that its gradient is too."""
        first, *others = self.params
        return not others and first.strides is None and first.shape.numel() == self.layout.numel


class _Kind(NamedTuple):
    """Common properties of the parameters in one buffer."""

    dtype: torch.dtype
    trainable: bool
    # See `BufferPlan`.
    travel: torch.dtype | None
    ranks: str
    is_whole: bool = False


def plan_buffers(
    units: Sequence[Sequence[nn.Parameter]],
    names: Mapping[int, tuple[str, ...]],
    world_size: int,
    cuts: Mapping[int, Cut],
    group_of: Mapping[int, int],
    *,
    dtypes: Mapping[int, torch.dtype],
    travels: Mapping[int, torch.dtype] | None = None,
    strides: Mapping[int, tuple[int, ...]] | None = None,
    ranks_of: Mapping[int, str] | None = None,
    num_shards: Mapping[str, int] | None = None,
) -> list[tuple[BufferPlan, ...]]:
    """Plan the buffers of every unit together; see NOTE(whole)."""
    num_shards = {"": world_size, **(num_shards or {})}
    kinds = [
        _kinds_of(params, cuts, group_of, dtypes, travels or {}, ranks_of=ranks_of or {})
        for params in units
    ]
    owners: dict[int, int] = {}
    # (trainable, ranks) -> bytes that each rank has so far.
    loads = {
        (trainable, ranks): [0] * size
        for trainable in (True, False)
        for ranks, size in num_shards.items()
    }
    for together, of_ranks in loads.items():
        whole = [
            param
            for of_unit in kinds
            for kind, params in of_unit.items()
            if kind.is_whole and (kind.trainable, kind.ranks) == together
            for param in params
        ]
        ranks = give_whole([param.numel() * param.element_size() for param in whole], of_ranks)
        owners.update(zip(map(id, whole), ranks, strict=True))

    def plan(kind: _Kind, params: list[nn.Parameter]) -> BufferPlan:
        dtype, trainable, travel, ranks, is_whole = kind
        if is_whole:
            # The sort is stable, and keeps model order within an owner.
            params = sorted(params, key=lambda param: owners[id(param)])
        plans = tuple(
            ParameterPlan(
                names[id(p)],
                p.shape,
                dtype,
                trainable,
                cuts.get(id(p), Cut.FLAT),
                (strides or {}).get(id(p)),
            )
            for p in params
        )
        owned_by = [owners[id(param)] for param in params] if is_whole else None
        layout = _lay_out_buffer(plans, dtype, owned_by, loads[trainable, ranks])
        return BufferPlan(plans, layout, dtype, trainable, travel, ranks)

    return [tuple(plan(kind, params) for kind, params in unit.items()) for unit in kinds]


def _kinds_of(
    params: Sequence[nn.Parameter],
    cuts: Mapping[int, Cut],
    group_of: Mapping[int, int],
    dtypes: Mapping[int, torch.dtype],
    travels: Mapping[int, torch.dtype],
    *,
    ranks_of: Mapping[int, str],
) -> dict[_Kind, list[nn.Parameter]]:
    """Divide parameters by dtypes, whether they train, their ranks, and whether they stay whole."""
    kinds: dict[_Kind, list[nn.Parameter]] = {}
    for param in params:
        dtype, travel = dtypes[id(param)], travels.get(id(param))
        travel, ranks = None if travel == dtype else travel, ranks_of.get(id(param), "")
        kind = _Kind(dtype, param.requires_grad, travel, ranks)
        kinds.setdefault(kind, []).append(param)
    split: dict[_Kind, list[nn.Parameter]] = {}
    for kind, chosen in kinds.items():
        # The sort is stable, and keeps model order within a param group.
        chosen.sort(key=lambda param: group_of.get(id(param), -1))
        whole = [param for param in chosen if cuts.get(id(param)) == Cut.TENSOR]
        rest = [param for param in chosen if cuts.get(id(param)) != Cut.TENSOR]
        if whole and _numel(rest) * _JOINS_WHOLE <= _numel(whole):
            # One collective fewer, and hardly worse balanced.
            whole, rest = chosen, []
        for is_whole, members in ((True, whole), (False, rest)):
            if members:
                split[kind._replace(is_whole=is_whole)] = members
    return split


def _lay_out_buffer(
    plans: Sequence[ParameterPlan],
    dtype: torch.dtype,
    owners: Sequence[int] | None,
    loads: list[int],
) -> FlatLayout:
    numels, world_size = [plan.shape.numel() for plan in plans], len(loads)
    align = max(1, ALIGN_BYTES // dtype.itemsize)
    if owners is not None:
        return FlatLayout.plan_whole(numels, owners, world_size=world_size, align=align)
    if all(plan.cut == Cut.FLAT for plan in plans):
        return FlatLayout.plan(numels, world_size=world_size, align=align)
    layout = FlatLayout.plan_cut(
        numels,
        [_grain_of(plan, align, world_size) for plan in plans],
        world_size=world_size,
        align=align,
        loads=[num_bytes / dtype.itemsize for num_bytes in loads],
    )
    loads[:] = [n + split * dtype.itemsize for n, split in zip(loads, layout.splits, strict=True)]
    return layout


def _grain_of(plan: ParameterPlan, align: int, world_size: int) -> int:
    """Return the grain of the parameter's cut, aligned too where shards stay about even."""
    grain = plan.cut.grain(plan.shape)
    aligned = math.lcm(grain, align)
    is_fine = plan.cut == Cut.FLAT or 4 * world_size * aligned <= plan.shape.numel()
    return aligned if is_fine else grain


def _numel(params: Sequence[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


@frozen
class UnitPlan:
    """Parameters that are unsharded, resharded and reduced together."""

    # Name of the module whose forward uses them; "" is the model itself.
    name: str
    buffers: tuple[BufferPlan, ...]
    # Whether other units run inside this one's forward, or it runs inside several.
    is_outer: bool
    # Whether it is replicated at every stage, as any module may use it.
    is_replicated: bool = False

    def param_placement(self, placement: Placement) -> Placement:
        """Return the placement of its parameters, given that of the model's parameters.

        Units of small parameters are replicated at every stage.
        """
        return Placement.REPLICATED if self.is_replicated else placement

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Return where each buffer starts in the unit's slot, in bytes, and where the last ends."""
        sizes = (_align_up(buffer.num_bytes, ALIGN_BYTES) for buffer in self.buffers)
        return tuple(accumulate(sizes, initial=0))

    @property
    def num_bytes(self) -> int:
        """Bytes that its slot must have."""
        return self.offsets[-1]

    @cached_property
    def extent(self) -> Extent:
        """Return its sizes while it is unsharded."""
        numel = sum(buffer.layout.payload_numel for buffer in self.buffers)
        return Extent(numel, self.num_bytes, self.is_outer)
