"""Whose turn it is to compute again."""

from __future__ import annotations

from threading import RLock, get_ident
from typing import final

from attrs import define, field


@final
@define(eq=False)
class Turn:
    """Held by the thread that recomputes: one at a time, as generators are shared."""

    _lock: RLock = field(factory=RLock, init=False)
    _thread: int | None = field(default=None, init=False)
    _depth: int = field(default=0, init=False)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._thread, self._depth = get_ident(), self._depth + 1

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._thread = None
        self._lock.release()

    @property
    def depth(self) -> int:
        """How many recomputations this thread is inside of."""
        return self._depth if self._thread == get_ident() else 0
