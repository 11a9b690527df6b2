"""Read i+1, step i, write i-1: the order in which sub-groups pass through memory."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from attrs import frozen

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


def run_pipeline(
    turns: Sequence[Turn],
    *,
    read: Callable[[Turn], Future[Any]],
    step: Callable[[Turn], None],
    write: Callable[[Turn], Future[Any]],
) -> None:
    """Step each in order, with one read ahead and one write behind. Blocks until all are written.

    The read of the next swapped sub-group has begun before a step does; the write of the last has
    begun and is not waited for until its slot is needed again.

    Args:
        turns: From `plan_turns`.
        read: Begins to fill the slot of a turn; for swapped ones only.
        step: Works on what the slot, or memory, holds.
        write: Begins to keep what the slot holds; for swapped ones only.

    Raises:
        Whatever these raise, or their futures, the first of them; nothing is under way then.
    """
    ahead = deque(turn for turn in turns if turn.slot is not None)
    reads: dict[Turn, Future[Any]] = {}
    writes: dict[int, Future[Any]] = {}  # by slot

    def begin_read() -> None:
        if ahead:
            turn = ahead.popleft()
            _result(writes, turn.slot)
            reads[turn] = read(turn)

    try:
        begin_read()
        for turn in turns:
            if turn.slot is not None:
                begin_read()
                _result(reads, turn)
            step(turn)
            if turn.slot is not None:
                writes[turn.slot] = write(turn)
        for slot in list(writes):
            _result(writes, slot)
    finally:
        for future in (*reads.values(), *writes.values()):  # after an error: slots are borrowed
            with contextlib.suppress(Exception):
                future.result()


def _result(futures: dict[Any, Future[Any]], key: Any) -> None:
    if key in futures:
        futures.pop(key).result()
