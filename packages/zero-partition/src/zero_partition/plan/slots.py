"""Permanent memory with changing owners, into which units are gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import torch
from attrs import Factory, define, field
from torch import Tensor

# NOTE(slots): autograd keeps views made in forward, so a unit must return to the same bytes before
# its backward. Slots are therefore permanent memory, a unit never changes its slot, and what
# protects a reader is the owner check: writes through another unit's view bump no version that
# autograd looks at. A slot keeps its contents after its owner was resharded, until another unit
# takes it over: a unit that returns first needs no gather.

Owner = TypeVar("Owner")


@define(eq=False)
class Slot(Generic[Owner]):
    """Some bytes, and who they belong to."""

    index: int
    num_bytes: int
    memory: Tensor | None = None  # 1-D uint8
    owner: Owner | None = None
    last_use: int = -1

    def allocate(self, device: torch.device) -> Tensor:
        """The memory, made at first use."""
        if self.memory is None:
            # Zeroed once, so that no NaN of a former life travels as padding.
            self.memory = torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)
        return self.memory

    def release(self) -> None:
        """Give the memory back. Views that somebody kept keep it alive, but are stale."""
        self.memory, self.owner = None, None


@define(eq=False)
class SlotPool(Generic[Owner]):
    """A ring of slots, and one more for who finds none free or cannot share."""

    device: torch.device
    is_busy: Callable[[Owner], bool]  # whether an owner's slot must be left alone
    ring: list[Slot[Owner]] = Factory(list)
    extra: list[Slot[Owner]] = Factory(list)
    conflicts: int = 0  # owners that found no free slot in the ring, and got one of their own
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
        """A ring for owners of these sizes in bytes, `num_slots` of them at a time.

        The ring's slots are as large as the `num_slots` largest sizes, so that any `num_slots`
        owners fit side by side without every slot being as large as the largest.
        """
        pool = cls(device, is_busy)
        pool.deal(sorted(sizes, reverse=True)[:num_slots])
        return pool

    def deal(self, sizes: Sequence[int]) -> None:
        """A new ring of slots of these sizes in bytes; nobody has one yet, and memory is freed."""
        self.release()
        self.ring = [Slot(index, size) for index, size in enumerate(sizes)]
        self.conflicts = 0

    @property
    def slots(self) -> list[Slot[Owner]]:
        """Every slot there is."""
        return [*self.ring, *self.extra]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots that have memory."""
        return sum(slot.num_bytes for slot in self.slots if slot.memory is not None)

    def find(self, num_bytes: int) -> Slot[Owner] | None:
        """The free slot of the ring that was used longest ago and is large enough, if any."""
        found = None
        for slot in self.ring:
            is_free = slot.owner is None or not self.is_busy(slot.owner)
            is_older = found is None or slot.last_use < found.last_use
            if is_older and is_free and slot.num_bytes >= num_bytes:
                found = slot
        return found

    def take(self, num_bytes: int, *, alone: bool = False) -> Slot[Owner]:
        """A slot of so many bytes: of the ring, or one more where `alone` or where none is free."""
        slot = None if alone else self.find(num_bytes)
        if slot is None:
            self.conflicts += not alone
            slot = Slot(len(self.slots), num_bytes)
            self.extra.append(slot)
        self._clock += 1
        slot.last_use = self._clock
        return slot

    def take_again(self, num_bytes: int, *, alone: bool = False) -> Slot[Owner]:
        """As `take`, but first one beyond the ring of just this size that nobody has.

        Who has a slot alone finds it again in the next step.
        """
        for slot in self.extra:
            if slot.owner is None and slot.num_bytes == num_bytes:
                return slot
        return self.take(num_bytes, alone=alone)

    def release(self) -> None:
        """Give all memory back and forget who had which slot; it is allocated again when taken."""
        for slot in self.slots:
            slot.release()
        self.extra.clear()


REDUCTION_SLOTS: Final = 2  # one fills while the other travels


@define(eq=False)
class PlannedGradients:
    """Of one flat buffer."""

    num_bytes: int  # as they travel
    is_outer: bool
    slot: Slot[PlannedGradients] | None = None


@define(eq=False)
class ReductionPlan:
    """A backward in which gradients come buffer by buffer."""

    pool: SlotPool[PlannedGradients]
    _in_flight: list[PlannedGradients] = field(factory=list, init=False)

    @classmethod
    def of(cls, gradients: Sequence[PlannedGradients]) -> ReductionPlan:
        """Nothing has come yet."""
        pool: SlotPool[PlannedGradients] = SlotPool.plan(
            [each.num_bytes for each in gradients if not each.is_outer],
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
        slot = self.pool.take_again(num_bytes, alone=alone)
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
