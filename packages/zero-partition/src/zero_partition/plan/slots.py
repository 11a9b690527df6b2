"""The order in which units are used, recorded once, and the slots in which they take turns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Final, Generic, NamedTuple, TypeVar

import torch
from attrs import Factory, define, evolve, field, frozen
from torch import Tensor

from zero_partition.torch_private import num_viewers

from .stages import expects, is_whole_number, names_fields

# A recording of more uses per unit is a loop that never returns to the model's own forward, as when
# inner modules are called by hand. It stops growing, and what is known is prefetched.
_MAX_USES_PER_UNIT: Final = 64


class Use(NamedTuple):
    """One moment at which a unit must be whole."""

    unit: int
    phase: str  # "forward", "recomputation" or "backward"
    # Units that something may read at this moment, this one included.
    in_use: frozenset[int]


@define
class ExecutionOrder:
    """Uses of units, in sequence, of one forward and the backward that follows it.

    A use that differs from the recording is looked up further on; prefetching goes on from there,
    and the new sequence replaces the old one when it is complete. Nothing fails and nothing is
    thrown away: a miss costs one late gather.
    """

    num_units: int
    misses: int = 0
    # Another list object when, and only when, the order has changed.
    recorded: list[Use] = Factory(list)
    # Position -> units whose gathers are launched there; None: not planned yet.
    launches: dict[int, list[int]] | None = None
    coming: tuple[tuple[int, int], ...] = ()  # (position, unit) of every gather, in sequence
    # Position of the last use, -1 before the first.
    position: int = field(default=-1, init=False)
    _recording: list[Use] = field(default=Factory(list), init=False)

    def restart(self) -> None:
        """Begin a new forward of the model: uses recorded since the last one become the order."""
        if self._recording and self._recording != self.recorded:
            self.recorded, self.launches = self._recording, None
        self._recording = []
        self.position = -1

    def observe(self, use: Use) -> None:
        """Record that a unit is used now, and find its position in the order."""
        if len(self._recording) < self.num_units * _MAX_USES_PER_UNIT:
            self._recording.append(use)
        following = self.position + 1
        if following < len(self.recorded) and self.recorded[following].unit == use.unit:
            self.position = following
        elif self.recorded:
            self.misses += 1
            self.position = self._find(use.unit, following)

    def plan(self, gathers: Sequence[PlannedGather]) -> dict[int, list[int]]:
        """Set the gathers of one pass through the recording, and return `launches`."""
        self.coming = tuple(sorted((gather.launched, gather.unit) for gather in gathers))
        self.launches = {}
        for gather in gathers:
            self.launches.setdefault(gather.launched, []).append(gather.unit)
        return self.launches

    def forget_launches(self) -> None:
        """Plan the gathers anew before the next pass: slots have changed."""
        self.launches = None

    def after(self, count: int) -> list[int]:
        """Return the units of the next `count` gathers that are not due yet."""
        start = bisect_right(self.coming, self.position, key=itemgetter(0))
        return [unit for _, unit in self.coming[start : start + count]]

    def _find(self, unit: int, start: int) -> int:
        for position in (*range(start, len(self.recorded)), *range(start)):
            if position < len(self.recorded) and self.recorded[position].unit == unit:
                return position
        return self.position


# Units that may be whole at a time on the CPU, if no window is given.
_WINDOW: Final = 3
# Replicated units whose encoded updates are in flight at a time.
ENCODED_IN_FLIGHT: Final = 2


def _at_least(minimum: int, *, or_none: bool = True) -> Callable[..., None]:
    return expects(
        f"an int of at least {minimum}",
        lambda value: is_whole_number(value, minimum) or (or_none and value is None),
    )


@names_fields
@frozen
class Limits:
    """Bounds of the schedule at stage 3. What a unit needs at its own use is always gathered.

    Elements are those of whole parameters, padding apart.

    Args:
        window: Units that may be whole at a time, the one in use included; those that enclose
            others do not count. None: three on the CPU, and two on other devices, where a gather
            does not need the processor that computes meanwhile.
        max_live_numel: Elements that may be whole at a time, those of units that enclose others
            included. Takes the place of `window` where it is given.
        prefetch_numel: Elements of units whose gather was launched before their use and is not yet
            waited for; 0 turns prefetching off. None: as many as may be whole.
        max_reuse_numel: A unit stays whole until its next use if the units used in between have no
            more elements, and as many may be whole. None: whenever as many may be whole.
        read_ahead: With offloaded parameters: units whose shards are read before their gather is
            due.

    Raises:
        PartitionError: Names the bound, what was expected and what came.
    """

    window: int | None = field(default=None, validator=_at_least(1))
    max_live_numel: int | None = field(default=None, validator=_at_least(1), kw_only=True)
    prefetch_numel: int | None = field(default=None, validator=_at_least(0), kw_only=True)
    max_reuse_numel: int | None = field(default=None, validator=_at_least(0), kw_only=True)
    read_ahead: int = field(default=2, validator=_at_least(0, or_none=False), kw_only=True)

    def with_window(self, *, keeps_free_memory: bool) -> Limits:
        """Return these limits with the default window if none was given; see NOTE(free memory)."""
        default = _WINDOW if keeps_free_memory else _WINDOW - 1
        return self if self.window is not None else evolve(self, window=default)

    @property
    def num_whole(self) -> int:
        """The window: units that may be whole at a time."""
        return _WINDOW if self.window is None else self.window

    def where_shards_are_read(self) -> Limits:
        """Return these limits without prefetching, for ranks that read peers' shards directly.

        Such a read needs no partner, so prefetching hides nothing.
        """
        return evolve(self, prefetch_numel=0)


# NOTE(colouring): a unit is whole while it is in use, before that while it is prefetched, and after
# that if it is used again soon. The moments of each are a set, kept as the bits of an int; two
# units may share a slot where their sets are disjoint. That is colouring an interval graph: taken
# by their first moments, a chain of equal units goes round as many slots as may be whole at a time.


@frozen
class Extent:
    """Sizes of one unit while it is unsharded."""

    # Elements without padding.
    numel: int
    num_bytes: int
    is_outer: bool  # see `UnitPlan`


@frozen
class PlannedGather:
    """One gather of a unit. Times are positions in the order of uses; -1 is before the first."""

    unit: int
    # The use during which it is launched; it is a prefetch if that is before `used`.
    launched: int
    used: int  # the first use that needs it
    # The use during which another unit takes its slot; None: never.
    released: int | None = None


def choose_slots(
    uses: Sequence[Use], extents: Mapping[int, Extent], limits: Limits
) -> tuple[tuple[int, ...], ...]:
    """Return the units that share each slot, a tuple per slot; see NOTE(colouring).

    Args:
        uses: Of one forward and its backward.
        extents: Of the units that need a slot; others are left out.
        limits: How many may be unsharded at a time. Units in use at the same time are unsharded
            together, whatever it says.
    """
    uses = [use for use in uses if use.unit in extents]
    moments_of = _whole_moments(uses, extents, limits)
    packed: list[_Slot] = []
    for unit, moments in moments_of.items():
        num_bytes = extents[unit].num_bytes
        free = [slot for slot in packed if not slot.moments & moments]
        if not free:
            packed += (free := [_Slot()])
        slot = min(free, key=lambda slot: max(0, num_bytes - slot.num_bytes))
        slot.give(unit, moments, num_bytes)
    return tuple(tuple(slot.units) for slot in _spread(packed, moments_of, extents))


def slot_bytes(groups: Sequence[Sequence[int]], extents: Mapping[int, Extent]) -> list[int]:
    """Return the bytes of the slot that each group of units shares: those of its largest unit."""
    return [max(extents[unit].num_bytes for unit in group) for group in groups]


def slot_conflicts(
    groups: Sequence[Sequence[int]], extents: Mapping[int, Extent], limits: Limits
) -> int:
    """Return the number of slots beyond the window, for units that must be unsharded as well."""
    if limits.max_live_numel is not None:
        return 0
    shared = sum(any(not extents[unit].is_outer for unit in group) for group in groups)
    return max(0, shared - limits.num_whole)


def _spread(
    packed: list[_Slot], moments_of: Mapping[int, int], extents: Mapping[int, Extent]
) -> list[_Slot]:
    """Assign units anew, each to the slot assigned longest ago: contents survive longest.

    Backwards that follow each other without a step then find more units unsharded. Slots keep
    their sizes. Returns `packed` itself where a unit finds no free slot that is large enough.
    """
    slots = [_Slot(num_bytes=slot.num_bytes) for slot in packed]
    for unit, moments in moments_of.items():
        num_bytes = extents[unit].num_bytes
        free = [s for s in slots if not s.moments & moments and s.num_bytes >= num_bytes]
        if not free:
            return packed
        slot = free[0]
        slot.give(unit, moments, num_bytes)
        # To the end: the first slot is the one that was assigned longest ago.
        slots.append(slots.pop(slots.index(slot)))
    return [slot for slot in slots if slot.units]


def plan_gathers(
    uses: Sequence[Use],
    extents: Mapping[int, Extent],
    slot_of: Mapping[int, int],
    *,
    prefetch_numel: int | None,
) -> tuple[PlannedGather, ...]:
    """Return every gather of one pass through the order, launched as soon as its slot is free.

    They are launched in the order of uses, so that ranks with one order launch in one order.

    Args:
        uses: Of one forward, and its backward if there is one; nothing is whole before.
        extents: Of the units that need a slot; others are left out.
        slot_of: Unit to slot, for the units that have one already; others cannot be prefetched.
        prefetch_numel: Elements launched and not yet used; None for no bound.
    """
    gathers: list[PlannedGather] = []
    # Slot -> index in `gathers` of its latest gather.
    latest: dict[int, int] = {}
    last_in_use: dict[int, int] = {}
    # Elements in flight at each position; the last one is for position -1.
    in_flight = [0] * (len(uses) + 1)
    earliest = -1
    for position, use in enumerate(uses):
        slot = slot_of.get(use.unit, -1 - use.unit)
        before = latest.get(slot)
        if use.unit in extents and (before is None or gathers[before].unit != use.unit):
            free_from = -1 if before is None else last_in_use[gathers[before].unit] + 1
            earliest = position if slot < 0 else max(earliest, free_from)
            numel, start = extents[use.unit].numel, position
            while start > earliest and _fits(in_flight[start] + numel, prefetch_numel):
                in_flight[start] += numel
                start -= 1
            earliest = start
            if before is not None:
                gathers[before] = evolve(gathers[before], released=start)
            latest[slot] = len(gathers)
            gathers.append(PlannedGather(use.unit, start, position))
        last_in_use.update(dict.fromkeys(use.in_use, position))
    return tuple(gathers)


@define(eq=False)
class _Slot:
    units: list[int] = field(factory=list)
    moments: int = 0
    num_bytes: int = 0

    def give(self, unit: int, moments: int, num_bytes: int) -> None:
        self.units.append(unit)
        self.moments |= moments
        self.num_bytes = max(self.num_bytes, num_bytes)


def _whole_moments(
    uses: Sequence[Use], extents: Mapping[int, Extent], limits: Limits
) -> dict[int, int]:
    """Return when each unit is unsharded: positions, as bits of an int; see NOTE(colouring)."""
    whole: dict[int, int] = {}
    # Whole units or elements at each position, whichever the limit counts.
    live = [0] * len(uses)
    limit, counts_numel = (
        limits.max_live_numel or limits.num_whole,
        limits.max_live_numel is not None,
    )

    def weight(unit: int) -> int:
        return extents[unit].numel if counts_numel else int(not extents[unit].is_outer)

    def is_whole(unit: int, position: int) -> bool:
        return bool(whole.get(unit, 0) >> position & 1)

    def has_room(unit: int, position: int) -> bool:
        return live[position] + weight(unit) <= limit

    def add(unit: int, position: int) -> None:
        whole[unit] = whole.get(unit, 0) | 1 << position
        live[position] += weight(unit)

    for position, use in enumerate(uses):
        for unit in sorted(use.in_use & extents.keys(), key=lambda unit: unit != use.unit):
            add(unit, position)
    in_flight, earliest = [0] * len(uses), 0
    # Before its use, a unit is whole while it is prefetched.
    for position, use in enumerate(uses):
        unit, numel, start = use.unit, extents[use.unit].numel, position
        while (
            start > earliest
            and not is_whole(unit, start - 1)
            and has_room(unit, start - 1)
            and _fits(in_flight[start - 1] + numel, limits.prefetch_numel)
        ):
            start -= 1
            add(unit, start)
            in_flight[start] += numel
        if start == 0 or not is_whole(unit, start - 1):
            # Launched here, and those that follow are not launched before it.
            earliest = start
    before = [0, *accumulate(extents[use.unit].numel for use in uses)]
    # Elements used between two uses of a unit, the unit, and the positions between.
    gaps: list[tuple[int, int, range]] = []
    for unit, moments in whole.items():
        positions = [position for position in range(len(uses)) if moments >> position & 1]
        for left, right in pairwise(positions):
            numel = before[right] - before[left + 1]
            if right > left + 1 and _fits(numel, limits.max_reuse_numel):
                gaps.append((numel, unit, range(left + 1, right)))
    # After its use, a unit stays whole if it is used again soon.
    for _, unit, gap in sorted(gaps, key=itemgetter(0)):
        if all(has_room(unit, position) for position in gap):
            for position in gap:
                add(unit, position)
    return whole


def _fits(numel: int, limit: int | None) -> bool:
    return limit is None or numel <= limit


# NOTE(slots): autograd keeps views made in forward, so a unit must return to the same bytes before
# its backward. Slots are therefore permanent memory, a unit never changes its slot, and what
# protects a reader is the owner check: writes through another unit's view bump no version that
# autograd looks at. A slot keeps its contents after its owner was resharded, until another unit
# takes it over: a unit that returns first needs no gather.

# NOTE(free memory): on the CPU, memory that is free until the next step stays allocated: giving it
# back and faulting its pages in again cost 5% of a step. On a device it goes back to the allocator,
# which keeps it for other uses: slots of parameters when the gradients of their unit have arrived,
# or else when the optimizer steps; reduction slots when they have no owner; shards of gradients
# when these are dropped. Our views stay, and their storage has no memory meanwhile. Other tensors
# may view a slot of parameters: those of a graph that will run again, or that is out of date and
# was not refused yet. Such memory stays as long as they exist.

Owner = TypeVar("Owner")
# Types of devices whose free memory stays allocated.
_KEEPERS: Final = {"cpu"}


def keeps_free_memory(device: torch.device) -> bool:
    """Return whether memory unused until the next step stays allocated; see NOTE(free memory)."""
    return device.type in _KEEPERS


@define(eq=False)
class Slot(Generic[Owner]):
    """Memory of one slot, and the owner that uses it now."""

    index: int
    num_bytes: int
    memory: Tensor | None = None  # 1-D uint8
    owner: Owner | None = None
    last_use: int = -1
    # Number of views of the memory that its owners keep.
    num_views: int = 0

    def allocate(self, device: torch.device, num_bytes: int | None = None) -> Tensor:
        """Return memory for another owner. It is allocated at first use, and anew after `vacate`.

        On a device it has `num_bytes`, if given, or stays larger if other tensors view it. On the
        CPU it has the slot's size.
        """
        if self.memory is None:
            self.memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        if num_bytes is None or keeps_free_memory(device):
            num_bytes = self.num_bytes
        storage = self.memory.untyped_storage()
        if storage.nbytes() < num_bytes or (storage.nbytes() > num_bytes and not self.is_viewed):
            # To 0 first: what the storage has is not wanted, and would be copied.
            storage.resize_(0)
            storage.resize_(num_bytes)
        return self.memory

    @property
    def allocated_bytes(self) -> int:
        """Return bytes that it takes now."""
        return 0 if self.memory is None else self.memory.untyped_storage().nbytes()

    @property
    def is_viewed(self) -> bool:
        """Return whether tensors besides its owners' view the memory."""
        return self.memory is not None and num_viewers(self.memory) > self.num_views + 1

    def occupy(self, owner: Owner) -> None:
        """Give the memory to another owner. The previous one knows that it has none."""
        self.owner = owner

    def count_views(self, num_views: int) -> None:
        """Count further views of the memory that an owner keeps."""
        self.num_views += num_views

    def vacate(self) -> None:
        """Remove the owner, and free memory of a device until `allocate`; see NOTE(free memory)."""
        # The owner first, since it takes it for granted that the slot has memory.
        self.owner = None
        if self.memory is not None and not keeps_free_memory(self.memory.device):
            self.memory.untyped_storage().resize_(0)

    def release(self) -> None:
        """Forget the memory. It stays alive as long as it is viewed, but such views are stale."""
        self.memory, self.owner, self.num_views = None, None, 0


@define(eq=False)
class SlotPool(Generic[Owner]):
    """A ring of slots, and extra slots for owners that find none free or cannot share one."""

    device: torch.device
    # Returns whether an owner's slot must not be given to another.
    is_busy: Callable[[Owner], bool]
    ring: list[Slot[Owner]] = Factory(list)
    extra: list[Slot[Owner]] = Factory(list)
    # Number of owners that found no free slot in the ring, and got an extra one.
    conflicts: int = 0
    _clock: int = field(default=0, init=False)

    @classmethod
    def plan(
        cls,
        sizes: Sequence[int],
        *,
        num_slots: int,
        device: torch.device,
        is_busy: Callable[[Owner], bool],
    ) -> SlotPool[Owner]:
        """Return a ring for owners of these sizes in bytes, `num_slots` of them at a time.

        The ring's slots are as large as the `num_slots` largest sizes, so that any `num_slots`
        owners fit side by side without every slot being as large as the largest.
        """
        pool = cls(device, is_busy)
        pool.make_ring(sorted(sizes, reverse=True)[:num_slots])
        return pool

    def make_ring(self, sizes: Sequence[int], num_conflicts: int = 0) -> None:
        """Free all slots, and make a ring of slots of these sizes in bytes, without owners.

        `num_conflicts` is the number of owners that are planned to find none free.
        """
        self.release()
        self.ring = [Slot(index, size) for index, size in enumerate(sizes)]
        self.conflicts = num_conflicts

    @property
    def slots(self) -> list[Slot[Owner]]:
        """Every slot there is."""
        return [*self.ring, *self.extra]

    @property
    def num_bytes(self) -> int:
        """Bytes that all slots take now."""
        return sum(slot.allocated_bytes for slot in self.slots)

    def find(self, num_bytes: int) -> Slot[Owner] | None:
        """Return the free slot of the ring, large enough, that was used longest ago, if any."""
        found = None
        for slot in self.ring:
            is_free = slot.owner is None or not self.is_busy(slot.owner)
            is_older = found is None or slot.last_use < found.last_use
            if is_older and is_free and slot.num_bytes >= num_bytes:
                found = slot
        return found

    def acquire(self, num_bytes: int, *, alone: bool = False, again: bool = False) -> Slot[Owner]:
        """Return a slot of at least so many bytes: of the ring, else an extra one.

        An extra one is made where `alone`, or where the ring has none free. With `again`, an extra
        slot of just this size without an owner is used first, so that an owner that shares with
        none gets its slot again in the next step.
        """
        slot = None if alone else self.find(num_bytes)
        for other in self.extra if slot is None and again else ():
            if other.owner is None and other.num_bytes == num_bytes:
                return other
        if slot is None:
            self.conflicts += not alone
            slot = Slot(len(self.slots), num_bytes)
            self.extra.append(slot)
        self._clock += 1
        slot.last_use = self._clock
        return slot

    def release(self) -> None:
        """Give all memory back and forget who had which slot; it is allocated again when taken."""
        for slot in self.slots:
            slot.release()
        self.extra.clear()


def reduction_slots(keeps_free_memory: bool) -> int:
    """Return how many units' gradients are collected and sent at a time.

    One fills while the other travels. Where gradients wait for each other, one is enough: it is
    taken when the reduction before has ended.
    """
    return 2 if keeps_free_memory else 1


# Up to this part of the largest reduction, the others count as hardly more.
_HARDLY_MORE: Final = 256


def is_hardly_more(num_bytes: Sequence[int]) -> bool:
    """Return whether reductions of these sizes are hardly more than the largest of them alone.

    A launch then gives the others no time to travel, and they stay in flight.
    """
    return sum(num_bytes) - max(num_bytes) <= max(num_bytes) // _HARDLY_MORE


@define(eq=False)
class PlannedGradients:
    """Gradients of one flat buffer in a planned backward."""

    num_bytes: int
    is_outer: bool
    is_adopted: bool  # see `BufferPlan.is_one_param`
    slot: Slot[PlannedGradients] | None = None


@define(eq=False)
class ReductionPlan:
    """Simulation of a backward, in which gradients come buffer by buffer, for its peak memory."""

    pool: SlotPool[PlannedGradients]
    keeps_free_memory: bool
    peak_bytes: int = field(default=0, init=False)
    _in_flight: list[PlannedGradients] = field(factory=list, init=False)

    @classmethod
    def of(cls, gradients: Sequence[PlannedGradients], *, keeps_free_memory: bool) -> ReductionPlan:
        """Return a plan in which no gradients have come yet."""
        pool: SlotPool[PlannedGradients] = SlotPool.plan(
            [each.num_bytes for each in gradients if not (each.is_outer or each.is_adopted)],
            num_slots=reduction_slots(keeps_free_memory),
            device=torch.device("meta"),
            is_busy=lambda owner: owner.slot is not None,
        )
        return cls(pool, keeps_free_memory)

    def collect(self, gradients: PlannedGradients) -> None:
        """Take a slot, as the first gradient of a buffer comes."""
        alone, num_bytes = gradients.is_outer or gradients.is_adopted, gradients.num_bytes
        while not alone and self._in_flight and self.pool.find(num_bytes) is None:
            self._finish()
        slot = self.pool.acquire(num_bytes, alone=alone, again=True)
        slot.owner, gradients.slot = gradients, slot
        slot.allocate(self.pool.device)
        self.peak_bytes = max(self.peak_bytes, self.pool.num_bytes)

    def launch(self, gradients: PlannedGradients) -> None:
        """Launch the reduction of a buffer, as its last gradient has come."""
        self._in_flight.append(gradients)
        while not is_hardly_more([each.num_bytes for each in self._in_flight]):
            self._finish()

    def flush(self) -> None:
        """Finish all reductions in flight, as backward has ended."""
        while self._in_flight:
            self._finish()

    def _finish(self) -> None:
        gradients = self._in_flight.pop(0)
        slot, gradients.slot = gradients.slot, None
        if slot is not None and (gradients.is_adopted or not self.keeps_free_memory):
            slot.vacate()
        elif slot is not None:
            slot.owner = None
