"""A store in host memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, final

from attrs import define, field
from torch import Tensor

from zero_offload.errors import StoreError
from zero_offload.memory.arena import HostArena

from .store import AbstractStore, check_form, flat_bytes, form_of


@final
@define(eq=False)
class HostStore(AbstractStore):
    """Values in memory of an arena. Calls return after the copy, so every future is done.

    Sources and destinations may be on any device.

    Args:
        arena: Allocates the memory, which it counts under `host store: KEY`.
    """

    arena: HostArena = field(factory=HostArena)
    _values: dict[str, Tensor] = field(factory=dict, init=False)
    # Key -> numel and dtype of the value as text; only of keys that have been written.
    _forms: dict[str, str] = field(factory=dict, init=False)
    _is_closed: bool = field(default=False, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def allocate(self, sizes: Mapping[str, int]) -> None:
        """Allocate memory of these sizes; see `AbstractStore.allocate`."""
        with self._lock:
            self._check_open()
            for key in sizes:
                if key in self._values:
                    raise StoreError(f"{key!r} is allocated already", key=key)
            self._values |= {key: self._allocate(key, nbytes) for key, nbytes in sizes.items()}

    def write(self, key: str, source: Tensor) -> Future[None]:
        """Copy `source` to the value of `key`; see `AbstractStore.write`."""
        return self._copy(key, source, writes=True)

    def read(self, key: str, into: Tensor) -> Future[Tensor]:
        """Copy the value of `key` into `into`; see `AbstractStore.read`."""
        return self._copy(key, into, writes=False)

    def delete(self, key: str) -> None:
        """Delete a key and release its memory."""
        with self._lock:
            self._check_open()
            if key not in self._values:
                raise _unknown(key)
            del self._values[key]
            self._forms.pop(key, None)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each key's value, allocated or written."""
        with self._lock:
            return {key: memory.nbytes for key, memory in self._values.items()}

    def close(self) -> None:
        """Release all values. Again: nothing happens."""
        with self._lock:
            self._values.clear()
            self._is_closed = True

    def _copy(self, key: str, tensor: Tensor, *, writes: bool) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            with self._lock:
                self._check_open()
                flat = flat_bytes(key, tensor)
                if writes:
                    self._write(key, flat)
                    self._forms[key] = form_of(tensor)
                elif key not in self._forms:
                    raise _unknown(key)
                else:
                    check_form(key, self._forms[key], tensor)
                    flat.copy_(self._values[key])
            future.set_result(None if writes else tensor)
        except Exception as error:
            future.set_exception(error)
        return future

    def _write(self, key: str, flat: Tensor) -> None:
        if key in self._values and self._values[key].nbytes != flat.nbytes:
            # Release the memory before more is allocated.
            del self._values[key]
            self._forms.pop(key, None)
        if key not in self._values:
            self._values[key] = self._allocate(key, flat.nbytes)
        self._values[key].copy_(flat)

    def _allocate(self, key: str, nbytes: int) -> Tensor:
        return self.arena.allocate(nbytes, name=f"host store: {key}")

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError("this HostStore is closed")


def _unknown(key: str) -> StoreError:
    return StoreError(f"{key!r} was never written to this HostStore", key=key)
