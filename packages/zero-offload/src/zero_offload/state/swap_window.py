"""A window over a store: reads values ahead of their use, and writes them back in background."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, final

from attrs import define, field
from torch import Tensor

from zero_offload.disk.store import AbstractStore
from zero_offload.memory.arena import HostArena
from zero_offload.ranges import ranged

# At a time one value is read, one is stepped and one is written.
NUM_SLOTS: Final = 3
# Several optimizers may share a store, so each numbers its keys.
_NUMBERS: Final = itertools.count()
_DONE: Final[Future[Any]] = Future()
_DONE.set_result(None)


@final
@define(eq=False)
class SwapWindow:
    """Values of a store, each in one of a few slots of memory while it is open.

    As many as there are slots are read ahead, in the order in which they are expected. A closed
    value is written in the background. The read of the next value in its slot begins by itself when
    the write has ended; only `flush`, and `open` of that next value, wait for the write.

    Args:
        store: Keeps the values, under one key each.
        arena: Allocates the slots.
    """

    store: AbstractStore
    arena: HostArena
    # Key whose write has failed, or None. It may have been closed long before.
    failed: int | None = field(default=None, init=False)
    _name: str = field(factory=lambda: f"optimizer-{next(_NUMBERS)}", init=False)
    # Key -> bytes of its value.
    _sizes: dict[int, int] = field(factory=dict, init=False)
    # Keys whose values are in the store. Others are not read.
    _written: set[int] = field(factory=set, init=False)
    _slots: list[Tensor] = field(factory=list, init=False)
    # Keys whose read has not begun, with their slots, in order.
    _expected: deque[tuple[int, int]] = field(factory=deque, init=False)
    # Key -> its slot, and a future that is done when the read has begun, whose result is the read.
    _reads: dict[int, tuple[int, Future[Future[Any]]]] = field(factory=dict, init=False)
    # Slot -> key that was in it last, and the write of its value.
    _writes: dict[int, tuple[int, Future[Any]]] = field(factory=dict, init=False)

    def add(self, sizes: Mapping[int, int]) -> None:
        """Allocate further values in the store, and slots of memory for the largest.

        No read or write may be in progress.

        Raises:
            StoreError: The store has too little space for the values.
            BudgetError: The host has too little memory for the slots.
        """
        if not sizes:
            return
        self.store.allocate({self._name_of(key): nbytes for key, nbytes in sizes.items()})
        self._sizes |= sizes
        # All values are in the store. Release the slots before larger ones are allocated.
        self._slots = []
        wanted = slots_of(list(self._sizes.values()))
        self._slots = [self.arena.allocate(nbytes, name="swap slots") for nbytes in wanted]

    @ranged("swap_in", "_name")
    def expect(self, keys: Sequence[int]) -> None:
        """Begin to read the first of these keys, which are opened next, in this order.

        Waits for nothing, unless other keys are being read: then for these reads, and for the
        writes that they follow.
        """
        if list(self._reads) != list(keys[: len(self._reads)]):
            # The reads in progress are of other keys.
            self.forget()
        turns = [(key, position % NUM_SLOTS) for position, key in enumerate(keys)]
        self._expected = deque(turns[len(self._reads) :])
        while self._expected and len(self._reads) < NUM_SLOTS:
            self._read_next()

    @ranged("swap_in wait", "_name")
    def open(self, key: int) -> Tensor:
        """Return the memory of the next expected key: 1-D, bytes; not read if never written.

        Raises:
            Exception: From its read, or from the write of the key that was in its slot before.
        """
        slot, started = self._reads[key]
        if slot in self._writes:
            # `failed` keeps the key if the write raises.
            self.failed, write = self._writes.pop(slot)
            write.result()
            self.failed = None
        started.result().result()
        return self._memory(key, slot)

    @ranged("swap_out", "_name")
    def close(self, key: int, *, dirty: bool) -> None:
        """Free the slot of an open key for the next one; if `dirty`, once its value is written."""
        slot, _ = self._reads.pop(key)
        if dirty:
            self._written.add(key)
            write = self.store.write(self._name_of(key), self._memory(key, slot))
            self._writes[slot] = key, write
        # The next expected key has the same slot; see `expect`.
        if self._expected:
            self._read_next()

    @ranged("swap_out wait", "_name")
    def flush(self) -> None:
        """Block until all closed values are written.

        Raises:
            Exception: From the first write that failed; no write is in progress then.
        """
        errors = {}
        for key, write in self._writes.values():
            try:
                write.result()
            except Exception as error:
                errors[key] = error
        self._writes = {}
        for self.failed, error in errors.items():
            raise error

    def forget_failure(self) -> None:
        """Forget a failed write: all values are going to be replaced."""
        self.failed = None

    def forget(self) -> None:
        """Drop all expected keys, and block until the reads in progress have ended."""
        self._expected.clear()
        while self._reads:
            _, (slot, started) = self._reads.popitem()
            with contextlib.suppress(Exception):
                # The read begins after this write. If the write fails, `flush` raises its error.
                if slot in self._writes:
                    self._writes[slot][1].result()
                started.result().result()

    def lose(self, key: int) -> None:
        """Treat a key as never written, since the store cannot read its value any more."""
        self._written.discard(key)

    def end(self, *, deletes: bool) -> None:
        """Release the slots and all keys; with `deletes`, delete the values from the store."""
        for key in self._sizes if deletes else ():
            self.store.delete(self._name_of(key))
        self._sizes, self._slots, self._written = {}, [], set()

    def _read_next(self) -> None:
        """Begin to read the next expected key, after the write of its slot if one is in progress.

        If the write fails, the key is not read.
        """
        key, slot = self._expected.popleft()
        started: Future[Future[Any]] = Future()

        def begin(written: Future[Any]) -> None:
            try:
                if (error := written.exception()) is not None:
                    raise error
                if key in self._written:
                    started.set_result(self.store.read(self._name_of(key), self._memory(key, slot)))
                else:
                    started.set_result(_DONE)
            except BaseException as error:
                started.set_exception(error)

        self._reads[key] = slot, started
        self._writes.get(slot, (key, _DONE))[1].add_done_callback(begin)

    def _memory(self, key: int, slot: int) -> Tensor:
        return self._slots[slot][: self._sizes[key]]

    def _name_of(self, key: int) -> str:
        return f"{self._name}.{key}"


def slots_of(sizes: Sequence[int]) -> list[int]:
    """Return the bytes of each slot: of as many as are in use at once, each for the largest."""
    return [max(sizes, default=0)] * min(NUM_SLOTS, len(sizes))
