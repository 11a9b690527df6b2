"""Read i+1, step i, write i-1: the order in which sub-groups pass through memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, final

from attrs import define, field, frozen
from torch import Tensor

from zero_offload.disk.store import AbstractStore
from zero_offload.memory.arena import HostArena

NUM_SLOTS: Final = 3  # one being read, one stepped, one written


@frozen
class Turn:
    """One sub-group's turn. `slot` is where it passes through memory; None: it rests there."""

    subgroup: int
    slot: int | None


def plan_turns(subgroups: Sequence[int], is_swapped: Callable[[int], bool]) -> tuple[Turn, ...]:
    """Turns in order; slots go round among those that are swapped."""
    turns, num_swapped = [], 0
    for subgroup in subgroups:
        if is_swapped(subgroup):
            turns.append(Turn(subgroup, num_swapped % NUM_SLOTS))
            num_swapped += 1
        else:
            turns.append(Turn(subgroup, None))
    return tuple(turns)


@define(eq=False)
class Pipeline:
    """Has sub-groups read ahead and written behind while another is stepped.

    Between runs reads may be under way ahead of the next one, and writes behind the last. A read
    into a slot that is still being written begins by itself when that is done: nobody waits for it.

    Args:
        read: Begins to fill the slot of a turn; called for swapped ones only, from any thread.
        write: Begins to keep what the slot holds; for swapped ones only.
    """

    read: Callable[[Turn], Future[Any]]
    write: Callable[[Turn], Future[Any]]
    _reads: dict[Turn, _Read] = field(factory=dict, init=False)  # in order of turns
    _writes: dict[int, Future[Any]] = field(factory=dict, init=False)  # by slot
    has_failed: bool = field(default=False, init=False)  # a write, maybe of an earlier run

    def read_ahead(self, turns: Sequence[Turn]) -> None:
        """Begin the reads of the next run, as far as there are slots. Waits for nothing."""
        if not self._reads:
            self._begin(_swapped(turns)[:NUM_SLOTS])

    def run(
        self, turns: Sequence[Turn], step: Callable[[Turn], None], *, writes: bool = True
    ) -> None:
        """Step each in order. The last writes are under way when it returns; see `settle`.

        The reads of the next two swapped sub-groups are on their way before a step is; the write of
        the last has begun and is not waited for until its slot is needed again.

        Args:
            turns: From `plan_turns`.
            step: Works on what the slot, or memory, holds.
            writes: Whether it changes that.

        Raises:
            Whatever these raise, or their futures, the first of them; nothing is under way then.
        """
        swapped = _swapped(turns)
        if list(self._reads) != swapped[: len(self._reads)]:
            self.forget_reads()  # they were for other turns
        position = 0
        try:
            for turn in turns:
                # Not further: a slot is another's when its last turn is stepped and written.
                coming = swapped[position : position + NUM_SLOTS]
                self._begin([each for each in coming if each not in self._reads])
                if turn.slot is not None:
                    position += 1
                    self._wait_for_write(turn.slot)
                    self._reads[turn].result()
                step(turn)
                if turn.slot is not None:
                    if writes:
                        self._writes[turn.slot] = self.write(turn)
                    del self._reads[turn]
        except BaseException:
            self.forget_reads()
            _drain(self._writes)
            raise

    def settle(self) -> None:
        """Block until all is written.

        Raises:
            Whatever a write raised, the first of them; none is under way then.
        """
        errors = _drain(self._writes)
        if errors:
            self.has_failed = True
            raise errors[0]

    def forget_reads(self) -> None:
        """Block until slots are filled that nobody will look at."""
        for turn in self._reads:
            if (
                turn.slot in self._writes
            ):  # which such a read comes after; `settle` says if it failed
                with contextlib.suppress(Exception):
                    self._writes[turn.slot].result()
        _drain(self._reads)

    def _begin(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            assert turn.slot is not None, "only what is swapped is read"
            self._reads[turn] = _Read(partial(self.read, turn), self._writes.get(turn.slot))

    def _wait_for_write(self, slot: int) -> None:
        """What the slot held before must be written, and not have failed."""
        if slot in self._writes:
            try:
                self._writes.pop(slot).result()
            except BaseException:
                self.has_failed = True
                raise


class _Read:
    """One that begins when a write is done, or at once. Not at all if that failed."""

    def __init__(self, begin: Callable[[], Future[Any]], after: Future[Any] | None) -> None:
        self._begun: Future[Future[Any]] = Future()

        def go(written: Future[Any] | None) -> None:
            try:
                if written is not None and (error := written.exception()) is not None:
                    raise error
                self._begun.set_result(begin())
            except BaseException as error:
                self._begun.set_exception(error)

        if after is None:
            go(None)
        else:
            after.add_done_callback(go)

    def result(self) -> Any:
        """Block until it is done."""
        return self._begun.result().result()


def _drain(futures: dict[Any, Any]) -> list[Exception]:
    """Wait for each, and forget it; what they raised."""
    errors = []
    while futures:
        try:
            futures.pop(next(iter(futures))).result()
        except Exception as error:
            errors.append(error)
    return errors


def _swapped(turns: Sequence[Turn]) -> list[Turn]:
    return [turn for turn in turns if turn.slot is not None]


# ---- Sub-groups between a store and the slots through which they pass in memory ----


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
