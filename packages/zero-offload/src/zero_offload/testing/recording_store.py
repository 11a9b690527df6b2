"""A store for tests that records the order of operations, and fails on request."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, final

from attrs import define, field
from torch import Tensor

from zero_offload.disk.host_store import HostStore
from zero_offload.disk.store import AbstractStore
from zero_offload.errors import StoreError


@final
@define(eq=False)
class RecordingStore(AbstractStore):
    """Forwards to a store in memory. Notes each operation when it begins and when it is made.

    With `is_lazy`, a transfer is made only when its result is asked for: code that reads a slot
    before that, or writes it too early, gets wrong bytes.
    """

    inner: AbstractStore = field(factory=HostStore)
    events: list[tuple[str, str]] = field(factory=list)
    is_lazy: bool = True
    fails: tuple[str, int] | None = None
    """("read", 2): the third read fails."""
    writes: list[Future[None]] = field(factory=list, init=False)
    counts: dict[str, int] = field(factory=lambda: {"read": 0, "write": 0}, init=False)

    def allocate(self, sizes: Mapping[str, int]) -> None:
        """See `AbstractStore.allocate`."""
        self.inner.allocate(sizes)

    def write(self, key: str, source: Tensor) -> Future[None]:
        """See `AbstractStore.write`."""
        future = self._begin("write", key, lambda: self.inner.write(key, source).result())
        self.writes.append(future)
        return future

    def catch_up(self, *, but: int = 0) -> None:
        """Make the writes that were not waited for yet, except the last `but`. Local."""
        for future in self.writes[: len(self.writes) - but]:
            with contextlib.suppress(StoreError):
                future.result()

    def read(self, key: str, into: Tensor) -> Future[Tensor]:
        """See `AbstractStore.read`."""
        return self._begin("read", key, lambda: self.inner.read(key, into).result())

    def delete(self, key: str) -> None:
        """See `AbstractStore.delete`."""
        self.inner.delete(key)

    def sizes(self) -> dict[str, int]:
        """See `AbstractStore.sizes`."""
        return self.inner.sizes()

    def close(self) -> None:
        """See `AbstractStore.close`."""
        self.inner.close()

    def _begin(self, verb: str, key: str, run: Any) -> Future[Any]:
        number = self.counts[verb]
        self.counts[verb] += 1
        self.events.append((verb, key))

        def act() -> Any:
            self.events.append((f"{verb} done", key))
            if self.fails == (verb, number):
                raise StoreError(f"injected: {verb} of {key!r}", key=key)
            return run()

        return _Lazy(act) if self.is_lazy else _eager(act)


class _Lazy(Future):
    """Does its work when it is waited for."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self._act = act
        self._lock = threading.Lock()

    def result(self, timeout: float | None = None) -> Any:
        with self._lock:
            if not self.done():
                try:
                    self.set_result(self._act())
                except Exception as error:
                    self.set_exception(error)
        return super().result(timeout)


def _eager(act: Any) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(act())
    except Exception as error:
        future.set_exception(error)
    return future
