"""How many bytes of slots a backward collects gradients in: the reducer's moves without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from attrs import define, field

from ._slots import Slot, SlotPool

REDUCTION_SLOTS: Final = 2  # one fills while the other travels


@define(eq=False)
class PlannedGradients:
    """Of one flat buffer."""

    num_bytes: int  # as they travel
    is_outer: bool
    slot: Slot[PlannedGradients] | None = None


def ring_bytes(gradients: Sequence[tuple[int, bool]]) -> list[int]:
    """Of those that take turns, among gradients of so many bytes that are outer or not."""
    return [num_bytes for num_bytes, is_outer in gradients if not is_outer]


@define(eq=False)
class ReductionPlan:
    """A backward in which gradients come buffer by buffer."""

    pool: SlotPool[PlannedGradients]
    _in_flight: list[PlannedGradients] = field(factory=list, init=False)

    @classmethod
    def of(cls, gradients: Sequence[PlannedGradients]) -> ReductionPlan:
        """Nothing has come yet."""
        pool: SlotPool[PlannedGradients] = SlotPool.plan(
            ring_bytes([(each.num_bytes, each.is_outer) for each in gradients]),
            num_slots=REDUCTION_SLOTS,
            device=torch.device("meta"),
            is_busy=lambda owner: owner.slot is not None,
        )
        return cls(pool)

    def collect(self, gradients: PlannedGradients) -> None:
        """The first of them comes."""
        alone, num_bytes = gradients.is_outer, gradients.num_bytes
        while not alone and self._in_flight and self.pool.find(num_bytes) is None:
            self._finish()
        slot = self.pool.take_again(gradients, num_bytes, alone=alone)
        slot.owner, gradients.slot = gradients, slot
        slot.allocate(self.pool.device)

    def launch(self, gradients: PlannedGradients) -> None:
        """The last of them has come."""
        self._in_flight.append(gradients)
        while len(self._in_flight) > REDUCTION_SLOTS - 1:
            self._finish()

    def _finish(self) -> None:
        gradients = self._in_flight.pop(0)
        if gradients.slot is not None:
            gradients.slot.owner, gradients.slot = None, None
