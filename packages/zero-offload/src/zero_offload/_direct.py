"""Whether a file system takes O_DIRECT, and in which units: tried, not believed."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Final

from attrs import frozen

from ._system import System
from ._transfer import aligned_memory

_UNITS: Final = (4096, 16384, 65536)  # nothing smaller is worth its own requests


@frozen
class Direct:
    """`align_bytes` is the unit of O_DIRECT transfers, or 1 and the reason why there are none."""

    align_bytes: int
    reason: str = ""

    @property
    def flag(self) -> int:
        """What to add to the flags of open."""
        return os.O_DIRECT if self.align_bytes > 1 else 0


def probe_direct(folder: Path, system: System) -> Direct:
    """Write one unit at an offset of one unit, and read it back, until a size is accepted.

    Raises:
        OSError: The folder cannot be written to at all.
    """
    path = str(folder / "probe")
    try:
        fd = system.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        with contextlib.suppress(OSError):
            system.unlink(path)  # some file systems make it, and refuse then
        if error.errno != errno.EINVAL:
            raise
        return Direct(1, f"the file system refuses O_DIRECT at open: {error.strerror}")
    reason = ""
    try:
        for unit in _UNITS:
            memory = aligned_memory(unit, unit)
            try:
                if system.pwritev(fd, [memory], unit) == system.preadv(fd, [memory], unit) == unit:
                    return Direct(unit)
                reason = f"O_DIRECT transfers of {unit} bytes are cut short"
            except OSError as error:
                reason = f"O_DIRECT transfers of {unit} bytes fail: {error.strerror}"
        return Direct(1, reason)
    finally:
        system.close(fd)
        system.unlink(path)
