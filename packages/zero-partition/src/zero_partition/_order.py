"""The order in which units are used: recorded once, then asked who is next."""

from __future__ import annotations

from typing import Final

from attrs import Factory, define, field

# A recording longer than this many uses per unit is a loop that never returns to the model's own
# forward (someone calls inner modules by hand): stop growing, prefetch what is known.
_MAX_USES_PER_UNIT: Final = 64


@define
class ExecutionOrder:
    """Uses of units, in sequence, of one forward and the backward that follows it.

    A use that differs from the recording is looked up further on; prefetching goes on from there,
    and the new sequence replaces the old one when it is complete. Nothing fails and nothing is
    thrown away: a miss costs one late gather.
    """

    num_units: int
    misses: int = 0
    _recorded: list[int] = Factory(list)
    _recording: list[int] = field(default=Factory(list), init=False)
    _cursor: int = field(default=-1, init=False)

    def restart(self) -> None:
        """A new forward of the model begins: what was recorded since the last one is the order."""
        if self._recording:
            self._recorded, self._recording = self._recording, []
        self._cursor = -1

    def observe(self, unit: int) -> None:
        """`unit` is used now."""
        if len(self._recording) < self.num_units * _MAX_USES_PER_UNIT:
            self._recording.append(unit)
        following = self._cursor + 1
        if following < len(self._recorded) and self._recorded[following] == unit:
            self._cursor = following
        elif self._recorded:
            self.misses += 1
            self._cursor = self._find(unit, following)

    def upcoming(self, count: int) -> list[int]:
        """The next `count` different units after the last use, into the next step if need be."""
        recorded = self._recorded
        found: list[int] = []
        for distance in range(1, len(recorded) + 1):
            if len(found) == count:
                break
            unit = recorded[(self._cursor + distance) % len(recorded)]
            if unit not in found:
                found.append(unit)
        return found

    def _find(self, unit: int, start: int) -> int:
        for position in (*range(start, len(self._recorded)), *range(start)):
            if position < len(self._recorded) and self._recorded[position] == unit:
                return position
        return self._cursor
