"""Measuring a disk for a few seconds, to choose how to use it."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from attrs import define, evolve, field
from torch import Tensor

from zero_offload.errors import StoreError
from zero_offload.memory.arena import HostArena

from .folder import SYSTEM, JobFolder
from .settings import DiskSettings
from .transport import AbstractTransport, Direct, choose_transport, probe_direct

_BLOCKS: Final = tuple(kib * 1024 for kib in (512, 1024, 4096, 8192))
_DEPTHS: Final = (2, 4, 8, 16)
_MOST_BYTES: Final = 256 * 2**20


@define(eq=False)
class _Candidate:
    settings: DiskSettings
    transport: AbstractTransport
    write_s: list[float] = field(factory=list)
    read_s: list[float] = field(factory=list)

    @property
    def pair_s(self) -> float:
        """Median seconds to write and read once: the cost of a swap."""
        return statistics.median(self.write_s) + statistics.median(self.read_s)


def tune(path: str | os.PathLike[str], *, seconds: float = 8.0) -> DiskSettings:
    """Measure ways of using the disk under `path`, print them, and return the best.

    Writes and reads one file of up to 256 MiB in a private folder there, which is removed; needs
    as much host memory. The best has the least time to write and read once. Block size, queue depth
    and io_uring or threads are tried, in turns, so that a disturbance hits all alike; each at least
    once, also where that takes longer than `seconds`. Blocks.

    Args:
        path: An existing folder on the disk to use.
        seconds: How long to measure, about.

    Raises:
        StoreError: The folder is missing or cannot be written to, or its disk is full.
    """
    folder = JobFolder(Path(path))
    candidates: list[_Candidate] = []
    file = str(folder.path / "measured")
    try:
        direct = probe_direct(folder.path, SYSTEM)
        free = os.statvfs(folder.path)
        nbytes = min(_MOST_BYTES, free.f_bavail * free.f_frsize // 4) // max(_BLOCKS) * max(_BLOCKS)
        if not nbytes:
            raise StoreError(f"{path}: the disk is too full to be measured", path=str(path))
        memory = HostArena("tune", is_pinned=False).allocate(nbytes)
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | direct.flag, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            candidates = _candidates(direct)
            # Swapping writes to files that were written before, and a first write takes longer.
            _time(candidates[0], fd, memory, direct, writes=True)
            stop = time.perf_counter() + seconds
            for count, candidate in enumerate(itertools.cycle(candidates)):
                if count >= len(candidates) and time.perf_counter() > stop:
                    break
                candidate.write_s.append(_time(candidate, fd, memory, direct, writes=True))
                candidate.read_s.append(_time(candidate, fd, memory, direct, writes=False))
        finally:
            os.close(fd)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            f"cannot measure in {path}: {error.strerror}", path=str(path), errno=error.errno
        ) from error
    finally:
        for candidate in candidates:
            candidate.transport.close()
        folder.close()
    candidates.sort(key=lambda each: each.pair_s)
    print(_table(candidates, nbytes, direct))
    return candidates[0].settings


def _candidates(direct: Direct) -> list[_Candidate]:
    found = []
    for block_bytes, depth in itertools.product(_BLOCKS, _DEPTHS):
        asked = DiskSettings(block_bytes=block_bytes, queue_depth=depth, num_workers=1)
        for uses_uring in (True, False):
            settings = evolve(asked, uses_uring=uses_uring)
            transport, why = choose_transport(settings, direct.align_bytes, SYSTEM)
            # Without io_uring, threads are used here too, and would be measured twice.
            if uses_uring and why:
                transport.close()
                continue
            found.append(_Candidate(evolve(settings, num_workers=2), transport))
    return found


def _time(candidate: _Candidate, fd: int, memory: Tensor, direct: Direct, *, writes: bool) -> float:
    # Drop the file from the page cache, which would be measured instead of the disk.
    if direct.align_bytes == 1 and not writes:
        os.posix_fadvise(fd, 0, memory.nbytes, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    candidate.transport.move(fd, memory, writes=writes)
    if direct.align_bytes == 1 and writes:
        os.fdatasync(fd)
    return time.perf_counter() - start


def _table(candidates: Sequence[_Candidate], nbytes: int, direct: Direct) -> str:
    note = direct.reason or f"O_DIRECT in units of {direct.align_bytes} bytes"
    lines = [f"one file of {nbytes // 2**20} MiB; {note}; the best first"]
    row = "{:<11}{:<11}{:<13}{:<12}{}".format
    lines.append(row("transport", "block KiB", "queue depth", "write GB/s", "read GB/s"))
    for each in candidates:
        how = each.settings
        transport = "io_uring" if how.uses_uring else "threads"
        speeds = (nbytes / statistics.median(some) / 1e9 for some in (each.write_s, each.read_s))
        shown = (f"{speed:.2f}" for speed in speeds)
        lines.append(row(transport, how.block_bytes // 1024, how.queue_depth, *shown))
    return "\n".join(lines)
