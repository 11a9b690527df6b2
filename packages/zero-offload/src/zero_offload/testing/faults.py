"""A disk that misbehaves: `System` values in which one call fails, or does less than asked."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import evolve

from zero_offload.disk.folder import SYSTEM, System


def refused(number: int) -> OSError:
    """Return the error that Python raises where the system says `number`."""
    return OSError(number, os.strerror(number))


def cut_short(most_bytes: int) -> System:
    """Return a system that moves at most so many bytes per call, not in units of a disk."""

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        count = min(most_bytes, os.preadv(fd, buffers, offset))
        buffers[0][count:] = b"?" * (len(buffers[0]) - count)
        return count

    def pwritev(fd: int, buffers: Any, offset: int) -> int:
        return min(most_bytes, os.pwritev(fd, buffers, offset))

    return evolve(SYSTEM, preadv=preadv, pwritev=pwritev)


def now_and_then(number: int, every: int) -> System:
    """Return a system that refuses one of `every` reads and writes with `number`."""
    count = iter(range(10**9))

    def with_faults(call: Callable[..., int]) -> Callable[..., int]:
        def faulty(*arguments: Any) -> int:
            if next(count) % every == every - 1:
                raise refused(number)
            return call(*arguments)

        return faulty

    return evolve(SYSTEM, preadv=with_faults(os.preadv), pwritev=with_faults(os.pwritev))


def only_units_of(unit: int) -> System:
    """Return a system whose O_DIRECT takes addresses, offsets and sizes in units of `unit`."""

    def in_units(call: Callable[..., int]) -> Callable[..., int]:
        def checked(fd: int, buffers: Any, offset: int) -> int:
            address = np.frombuffer(buffers[0], dtype=np.uint8).ctypes.data
            if _is_direct(fd) and (offset % unit or len(buffers[0]) % unit or address % unit):
                raise refused(errno.EINVAL)
            return call(fd, buffers, offset)

        return checked

    return evolve(SYSTEM, preadv=in_units(os.preadv), pwritev=in_units(os.pwritev))


def no_direct_open() -> System:
    """Return a system that refuses O_DIRECT at open, after it has made the file."""

    def refusing(path: str, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            os.close(os.open(path, flags & ~os.O_DIRECT, mode))
            raise refused(errno.EINVAL)
        return os.open(path, flags, mode)

    return evolve(SYSTEM, open=refusing)


def refusing(call: str, number: int, *, after: int = 0) -> System:
    """Return a system that refuses `call` with `number`, after `after` calls were granted."""
    granted = getattr(SYSTEM, call)
    left = iter(range(after))

    def refuse(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise refused(number)
        return granted(*arguments)

    return evolve(SYSTEM, **{call: refuse})


def free_bytes(nbytes: int) -> System:
    """Return a system whose disk reports `nbytes` of free space."""
    left = os.statvfs_result((1, 1, nbytes, nbytes, nbytes, 0, 0, 0, 0, 255))
    return evolve(SYSTEM, statvfs=lambda path: left)


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
