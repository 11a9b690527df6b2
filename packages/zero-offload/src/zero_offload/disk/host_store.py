"""A store in host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar, final

from attrs import define, field
from torch import Tensor

from zero_offload.errors import StoreError
from zero_offload.memory.arena import HostArena

from .store import AbstractStore, check_form, flat_bytes, form_of

T = TypeVar("T")


@define(eq=False)
class _Value:
    memory: Tensor
    form: str | None = None  # None: allocated, not written


@final
@define(eq=False)
class HostStore(AbstractStore):
    """Keeps values in an arena's memory. Copies before it returns, so every future is done.

    Sources and destinations may be on any device.

    Args:
        arena: Whose memory it is; counted there under `host store: KEY`.
    """

    arena: HostArena = field(factory=HostArena)
    _values: dict[str, _Value] = field(factory=dict, init=False)
    _is_closed: bool = field(default=False, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def allocate(self, sizes: Mapping[str, int]) -> None:
        """See `AbstractStore.allocate`."""
        with self._lock:
            self._check_open()
            for key in sizes:
                if key in self._values:
                    raise StoreError(f"{key!r} is allocated already", key=key)
            self._values |= {key: self._new(key, nbytes) for key, nbytes in sizes.items()}

    def write(self, key: str, source: Tensor) -> Future[None]:
        """See `AbstractStore.write`."""
        return _done(self._write, key, source)

    def read(self, key: str, into: Tensor) -> Future[Tensor]:
        """See `AbstractStore.read`."""
        return _done(self._read, key, into)

    def delete(self, key: str) -> None:
        """See `AbstractStore.delete`."""
        with self._lock:
            self._check_open()
            if self._values.pop(key, None) is None:
                raise _unknown(key)

    def sizes(self) -> dict[str, int]:
        """See `AbstractStore.sizes`."""
        with self._lock:
            return {key: value.memory.numel() for key, value in self._values.items()}

    def close(self) -> None:
        """See `AbstractStore.close`."""
        with self._lock:
            self._values.clear()
            self._is_closed = True

    def _write(self, key: str, source: Tensor) -> None:
        if not key:
            raise StoreError("a key must not be empty")
        flat = flat_bytes(key, source)
        with self._lock:
            self._check_open()
            value = self._values.get(key)
            if value is None or value.memory.numel() != flat.numel():
                self._values.pop(key, None)
                del value  # its memory goes before the new one comes
                value = self._values[key] = self._new(key, flat.numel())
            value.memory.copy_(flat)
            value.form = form_of(source)

    def _read(self, key: str, into: Tensor) -> Tensor:
        flat = flat_bytes(key, into)
        with self._lock:
            self._check_open()
            value = self._values.get(key)
            if value is None or value.form is None:
                raise _unknown(key)
            check_form(key, value.form, into)
            flat.copy_(value.memory)
        return into

    def _new(self, key: str, nbytes: int) -> _Value:
        return _Value(self.arena.allocate(nbytes, name=f"host store: {key}"))

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError("this HostStore is closed")


def _unknown(key: str) -> StoreError:
    return StoreError(f"{key!r} was never written to this HostStore", key=key)


def _done(function: Callable[..., T], *arguments: object) -> Future[T]:
    future: Future[T] = Future()
    try:
        future.set_result(function(*arguments))
    except Exception as error:
        future.set_exception(error)
    return future
