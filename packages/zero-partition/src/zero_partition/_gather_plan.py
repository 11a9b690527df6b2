"""Which units share a slot, and when their gathers are launched: arithmetic on a recorded order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from attrs import define, evolve, field, frozen

from ._limits import Limits
from ._order import Use

# NOTE(colouring): a unit is whole while it is in use, before that while it is prefetched, and after
# that if it is used again soon. The moments of each are a set, kept as the bits of an int; two
# units may share a slot where their sets are disjoint. That is colouring an interval graph: taken
# by their first moments, a chain of equal units goes round as many slots as may be whole at a time.


@frozen
class Extent:
    """What one unit takes while it is whole."""

    numel: int  # without padding
    num_bytes: int  # of its slot
    is_outer: bool  # other units run inside its forward


@frozen
class Gather:
    """One time that a unit becomes whole. Moments are positions in the order; -1 is before it."""

    unit: int
    launched: int  # during this use; ahead of its own if they differ
    used: int  # first
    released: int | None = None  # during this use another unit takes its memory; None: it stays


def choose_slots(
    uses: Sequence[Use], extents: Mapping[int, Extent], limits: Limits
) -> tuple[tuple[int, ...], ...]:
    """Units that take turns in one slot, a tuple for each slot; see NOTE(colouring).

    Args:
        uses: Of one forward and its backward.
        extents: Of the units that need a slot; others are left out.
        limits: How many may be whole at a time. Units in use at once are, whatever it says.
    """
    moments_of = _Moments.of([use for use in uses if use.unit in extents], extents, limits).of_unit
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
    """Of the slot in which the units of each group take turns: as large as the largest of them."""
    return [max(extents[unit].num_bytes for unit in group) for group in groups]


def slot_conflicts(
    groups: Sequence[Sequence[int]], extents: Mapping[int, Extent], limits: Limits
) -> int:
    """Slots beyond the window, for units that must be whole besides."""
    if limits.max_live_numel is not None:
        return 0
    shared = sum(any(not extents[unit].is_outer for unit in group) for group in groups)
    return max(0, shared - limits.window)


def _spread(
    packed: list[_Slot], moments_of: Mapping[int, int], extents: Mapping[int, Extent]
) -> list[_Slot]:
    """The same slots, each unit in the one given away longest ago: what is there stays longest.

    Backwards that follow each other without a step find more of it. As packed where that fails.
    """
    slots = [_Slot(num_bytes=slot.num_bytes) for slot in packed]
    for unit, moments in moments_of.items():
        num_bytes = extents[unit].num_bytes
        free = [s for s in slots if not s.moments & moments and s.num_bytes >= num_bytes]
        if not free:
            return packed
        slot = free[0]
        slot.give(unit, moments, num_bytes)
        slots.append(slots.pop(slots.index(slot)))  # least recent first
    return [slot for slot in slots if slot.units]


def plan_gathers(
    uses: Sequence[Use],
    extents: Mapping[int, Extent],
    slot_of: Mapping[int, int],
    *,
    prefetch_numel: int | None,
) -> tuple[Gather, ...]:
    """Every gather of one pass through the order, each launched as soon as its slot is free.

    One after the other in the order of uses, so that ranks with one order launch in one order.

    Args:
        uses: Of one forward, and its backward if there is one; nothing is whole before.
        extents: Of the units that need a slot; others are left out.
        slot_of: Unit to slot, for the units that have one already; others cannot be prefetched.
        prefetch_numel: Elements launched and not yet used; None for no bound.
    """
    gathers: list[Gather] = []
    latest: dict[int, int] = {}  # of each slot: where in `gathers`
    last_in_use: dict[int, int] = {}
    in_flight = [0] * (len(uses) + 1)  # at each position, from -1
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
            gathers.append(Gather(use.unit, start, position))
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


@define(eq=False)
class _Moments:
    """When each unit is whole; see NOTE(colouring)."""

    uses: Sequence[Use]
    extents: Mapping[int, Extent]
    limits: Limits
    of_unit: dict[int, int] = field(factory=dict, init=False)
    live: list[int] = field(init=False)  # at each position, in what the limit counts

    @classmethod
    def of(cls, uses: Sequence[Use], extents: Mapping[int, Extent], limits: Limits) -> _Moments:
        moments = cls(uses, extents, limits)
        moments._use()
        moments._prefetch()
        moments._reuse()
        return moments

    def __attrs_post_init__(self) -> None:
        self.live = [0] * len(self.uses)

    def weight(self, unit: int) -> int:
        extent = self.extents[unit]
        return int(not extent.is_outer) if self.limits.max_live_numel is None else extent.numel

    def has_room(self, unit: int, position: int) -> bool:
        limit = self.limits.max_live_numel or self.limits.window
        return self.live[position] + self.weight(unit) <= limit

    def is_whole(self, unit: int, position: int) -> bool:
        return bool(self.of_unit.get(unit, 0) >> position & 1)

    def add(self, unit: int, position: int) -> None:
        self.of_unit[unit] = self.of_unit.get(unit, 0) | 1 << position
        self.live[position] += self.weight(unit)

    def _use(self) -> None:
        for position, use in enumerate(self.uses):
            for unit in sorted(use.in_use & self.extents.keys(), key=lambda u: u != use.unit):
                self.add(unit, position)

    def _prefetch(self) -> None:
        in_flight, earliest = [0] * len(self.uses), 0
        for position, use in enumerate(self.uses):
            unit, numel, start = use.unit, self.extents[use.unit].numel, position
            while (
                start > earliest
                and not self.is_whole(unit, start - 1)
                and self.has_room(unit, start - 1)
                and _fits(in_flight[start - 1] + numel, self.limits.prefetch_numel)
            ):
                start -= 1
                self.add(unit, start)
                in_flight[start] += numel
            if start == 0 or not self.is_whole(unit, start - 1):
                earliest = start  # launched here: those that follow are not launched before it

    def _reuse(self) -> None:
        for _, unit, gap in sorted(self._gaps(), key=lambda gap: gap[0]):
            if all(self.has_room(unit, position) for position in gap):
                for position in gap:
                    self.add(unit, position)

    def _gaps(self) -> Iterator[tuple[int, int, range]]:
        """Elements used between two uses of a unit, the unit, and when that is."""
        before = [0]
        for use in self.uses:
            before.append(before[-1] + self.extents[use.unit].numel)
        for unit, moments in self.of_unit.items():
            whole = [position for position in range(len(self.uses)) if moments >> position & 1]
            for left, right in pairwise(whole):
                numel = before[right] - before[left + 1]
                if right > left + 1 and _fits(numel, self.limits.max_reuse_numel):
                    yield numel, unit, range(left + 1, right)


def _fits(numel: int, limit: int | None) -> bool:
    return limit is None or numel <= limit
