"""The most memory a process has held, as the kernel counts it; it overlooks nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest
from attrs import define, field

_RESET: Final = Path("/proc/self/clear_refs")

needs_high_water = pytest.mark.skipif(
    not _RESET.exists(), reason="needs Linux: the mark is reset through /proc/self/clear_refs"
)


@define
class HighWater:
    """The rise of resident memory since this was made."""

    _before: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        with suppress(OSError):  # not permitted: what was held earlier counts too
            _RESET.write_text("5")
        self._before = _status_bytes("VmRSS")

    def rise_bytes(self) -> int:
        """At its highest."""
        return _status_bytes("VmHWM") - self._before


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def resident_bytes() -> int:
    """Of this process, now."""
    return _status_bytes("VmRSS")


def give_back_free_memory() -> None:
    """What the C library keeps of memory that was freed, which would count as resident."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def giving_memory_back() -> Iterator[None]:
    """Below 32 MiB, glibc keeps what is freed in pieces that fit nothing; larger models go above.

    Map every piece instead, as it does with what is larger.
    """
    mallopt, threshold = ctypes.CDLL(None).mallopt, -3
    mallopt(threshold, 2**16)
    try:
        yield
    finally:
        mallopt(threshold, 2**25)
