"""Sub-groups between a store and the slots through which they pass in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final, final

from attrs import define, field
from torch import Tensor

from ._arena import HostArena
from ._pipeline import NUM_SLOTS, Turn
from ._store import AbstractStore

_NUMBERS: Final = itertools.count()  # two optimizers may share a store


@final
@define(eq=False)
class Swapper:
    """Owns the slots, and knows which sub-groups the store has.

    Args:
        store: Where sub-groups rest; one key each.
        arena: Whose memory the slots are.
    """

    store: AbstractStore
    arena: HostArena
    _name: str = field(factory=lambda: f"optimizer-{next(_NUMBERS)}", init=False)
    _sizes: dict[int, int] = field(factory=dict, init=False)  # of sub-groups, in bytes
    _written: set[int] = field(factory=set, init=False)
    _slots: list[Tensor] = field(factory=list, init=False)

    @property
    def slot_bytes(self) -> int:
        """Of all slots together."""
        return sum(slot.nbytes for slot in self._slots)

    def add(self, sizes: dict[int, int]) -> None:
        """Take room for further sub-groups in the store, and in memory for the largest.

        Nothing may be under way.

        Raises:
            StoreError: The store has no room for them.
            BudgetError: The host has none for the slots.
        """
        if not sizes:
            return
        self.store.allocate({self._key(index): nbytes for index, nbytes in sizes.items()})
        self._sizes |= sizes
        self._slots = []  # what they held is in the store
        wanted = slots_of(list(self._sizes.values()))
        self._slots = [self.arena.allocate(nbytes, name="swap slots") for nbytes in wanted]

    def memory(self, turn: Turn) -> Tensor:
        """The slot of a turn, as long as its sub-group: 1-D, bytes."""
        assert turn.slot is not None, f"sub-group {turn.subgroup} rests in memory"
        return self._slots[turn.slot][: self._sizes[turn.subgroup]]

    def swap_in(self, turn: Turn) -> Future[Any]:
        """Begin to fill the slot; with nothing, if the sub-group was never swapped out."""
        if turn.subgroup not in self._written:
            done: Future[Any] = Future()
            done.set_result(None)
            return done
        return self.store.read(self._key(turn.subgroup), self.memory(turn))

    def swap_out(self, turn: Turn) -> Future[Any]:
        """Begin to keep what the slot holds; it may not change until the future is done."""
        self._written.add(turn.subgroup)
        return self.store.write(self._key(turn.subgroup), self.memory(turn))

    def forget(self, subgroup: int) -> None:
        """What the store has of it is lost."""
        self._written.discard(subgroup)

    def close(self, *, deletes: bool) -> None:
        """Forget all sub-groups, and delete them from a store that lives on."""
        for index in self._sizes if deletes else ():
            self.store.delete(self._key(index))
        self._sizes, self._slots = {}, []
        self._written = set()

    def _key(self, subgroup: int) -> str:
        return f"{self._name}.{subgroup}"


def slots_of(sizes: Sequence[int]) -> list[int]:
    """Bytes of each slot: as many as may be in use at once, each for the largest."""
    return [max(sizes, default=0)] * min(NUM_SLOTS, len(sizes))
