"""Settings of the thread that decide what an operator computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import RLock, get_ident
from typing import Any, NamedTuple, final

import torch
from attrs import define, field, frozen


class _Autocast(NamedTuple):
    """Of one type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool


@frozen
class Ambient:
    """Autocast, as it was where a function was called first."""

    _autocasts: tuple[_Autocast, ...]

    @classmethod
    def take(cls) -> Ambient:
        """As it is now. Local."""
        accelerator = torch.accelerator.current_accelerator()
        types = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
        cache = torch.is_autocast_cache_enabled()
        return cls(
            tuple(
                _Autocast(
                    kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache
                )
                for kind in types
            )
        )

    def again(self) -> AbstractContextManager[Any]:
        """Inside, it is as it was; and gradients are recorded, as only then anything is saved."""
        # To leave an autocast empties its cache, which takes as long as a small operator.
        if not any(each.enabled for each in self._autocasts) and Ambient.take() == self:
            return torch.enable_grad()
        return self._entered()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for autocast in self._autocasts:
                stack.enter_context(torch.autocast(**autocast._asdict()))
            yield


# ---- Whose turn it is to compute again ----


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
