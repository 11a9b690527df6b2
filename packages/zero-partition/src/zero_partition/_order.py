"""The order in which units are used: recorded once, then asked who is next."""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter
from typing import Final, NamedTuple

from attrs import Factory, define, field

# A recording longer than this many uses per unit is a loop that never returns to the model's own
# forward (someone calls inner modules by hand): stop growing, prefetch what is known.
_MAX_USES_PER_UNIT: Final = 64


class Use(NamedTuple):
    """One moment at which a unit must be whole."""

    unit: int
    phase: str  # "forward", "recomputation" or "backward"
    in_use: frozenset[int]  # units that something may read at this moment, this one included


@define
class ExecutionOrder:
    """Uses of units, in sequence, of one forward and the backward that follows it.

    A use that differs from the recording is looked up further on; prefetching goes on from there,
    and the new sequence replaces the old one when it is complete. Nothing fails and nothing is
    thrown away: a miss costs one late gather.
    """

    num_units: int
    misses: int = 0
    recorded: list[Use] = Factory(list)  # another object when, and only when, it has changed
    launches: dict[int, list[int]] | None = None  # units to gather ahead, by position
    coming: tuple[tuple[int, int], ...] = ()  # (position, unit) of every gather, in sequence
    position: int = field(default=-1, init=False)  # of the last use, -1 before the first
    _recording: list[Use] = field(default=Factory(list), init=False)

    def restart(self) -> None:
        """A new forward of the model begins: what was recorded since the last one is the order."""
        if self._recording and self._recording != self.recorded:
            self.recorded, self.launches = self._recording, None
        self._recording = []
        self.position = -1

    def observe(self, use: Use) -> None:
        """A unit is used now."""
        if len(self._recording) < self.num_units * _MAX_USES_PER_UNIT:
            self._recording.append(use)
        following = self.position + 1
        if following < len(self.recorded) and self.recorded[following].unit == use.unit:
            self.position = following
        elif self.recorded:
            self.misses += 1
            self.position = self._find(use.unit, following)

    def after(self, count: int) -> list[int]:
        """Units of the next so many gathers that are not due yet."""
        start = bisect_right(self.coming, self.position, key=itemgetter(0))
        return [unit for _, unit in self.coming[start : start + count]]

    def _find(self, unit: int, start: int) -> int:
        for position in (*range(start, len(self.recorded)), *range(start)):
            if position < len(self.recorded) and self.recorded[position].unit == unit:
                return position
        return self.position
