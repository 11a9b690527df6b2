"""The calls of the operating system that disk I/O rests on, as one value."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from attrs import frozen


@frozen
class System:
    """A test puts a failing call in place of one of these; nobody else needs another value."""

    open: Callable[[str, int, int], int] = os.open
    close: Callable[[int], None] = os.close
    fstat: Callable[[int], os.stat_result] = os.fstat
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs
    fallocate: Callable[[int, int, int], None] = os.posix_fallocate
    truncate: Callable[[int, int], None] = os.ftruncate
    preadv: Callable[[int, Sequence[Any], int], int] = os.preadv
    pwritev: Callable[[int, Sequence[Any], int], int] = os.pwritev
    unlink: Callable[[str], None] = os.unlink
    flock: Callable[[int, int], None] = fcntl.flock


SYSTEM: Final = System()
