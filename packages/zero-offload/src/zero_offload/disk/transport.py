"""Moving bytes between memory and an open file: the plan in blocks, and by threads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, cast, final

import numpy as np
from attrs import define, field, frozen
from torch import Tensor

from zero_offload._native import kernels, native_status
from zero_offload._native.library import Transfer

from .folder import SYSTEM, System
from .settings import DiskSettings

# Tries of a request, 1 ms apart, while the kernel is too busy for it.
_MOST_RETRIES: Final = 2000
# Calls in a row that may move less than one unit of O_DIRECT, for one request.
_MOST_STALLS: Final = 3


@frozen
class IoBlock:
    """A run of bytes moved by one request, in place or through a bounce."""

    start: int
    nbytes: int
    bounces: bool


class AbstractTransport(ABC):
    """A way of moving bytes. Safe to use from several threads."""

    @abstractmethod
    def move(self, fd: int, memory: Tensor, *, writes: bool) -> int:
        """Move all of `memory`, flat bytes, from or to the beginning of an open file.

        Blocks; the GIL is released during transfers. Other threads must not use the memory until
        it returns. An end that is no multiple of O_DIRECT's unit is padded to one: with zeros when
        it is written.

        Returns:
            The bytes moved: fewer where the file ends early.

        Raises:
            OSError: The system refused; nothing of the transfer is under way any more.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for transfers in progress and release all resources."""


def plan_blocks(memory: Tensor, block_bytes: int, align: int) -> Iterator[IoBlock]:
    """Yield blocks: aligned memory in place; an unaligned end, or any other memory, bounced.

    `zero_io.cpp` cuts by the same rule.
    """
    address, nbytes = memory.data_ptr(), memory.nbytes
    start = 0
    while start < nbytes:
        size = min(block_bytes, nbytes - start)
        is_aligned = (address + start) % align == 0
        if is_aligned and size >= align:
            size -= size % align
        yield IoBlock(start, size, not is_aligned or size < align)
        start += size


def align_up(nbytes: int, align: int) -> int:
    """The next multiple of `align`."""
    return -(-nbytes // align) * align


def aligned_memory(nbytes: int, align: int) -> memoryview:
    """Private memory that starts on a multiple of `align`; touched when used."""
    mapping = mmap.mmap(-1, nbytes + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Huge pages are optional: some kernels and platforms do not have them.
    with contextlib.suppress(OSError, AttributeError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(mapping)
    start = -address_of(memory) % align
    return memory[start : start + nbytes]


def address_of(memory: memoryview) -> int:
    """Return the address of the first byte."""
    return np.frombuffer(memory, dtype=np.uint8).ctypes.data


@final
@define(eq=False)
class ThreadTransport(AbstractTransport):
    """pread and pwrite, each block by one of `queue_depth` threads per worker."""

    settings: DiskSettings
    align: int
    system: System = SYSTEM
    _pool: ThreadPoolExecutor = field(init=False)
    _bounces: SimpleQueue[memoryview] = field(factory=SimpleQueue, init=False)

    def __attrs_post_init__(self) -> None:
        num_threads = self.settings.queue_depth * self.settings.num_workers
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="zero-offload-block")
        # A bounce block for each thread, so that none waits for one.
        for _ in range(num_threads):
            self._bounces.put(aligned_memory(self.settings.block_bytes, self.align))

    def move(self, fd: int, memory: Tensor, *, writes: bool) -> int:
        """Move `memory` block by block in the threads; see `AbstractTransport.move`."""
        blocks = list(plan_blocks(memory, self.settings.block_bytes, self.align))
        view = memoryview(cast("Any", memory.numpy()))
        # The threads share this iterator, so that each block is taken once.
        rest = iter(blocks)
        # At most queue_depth threads serve one transfer, and take its blocks in turns.
        parts = [
            self._pool.submit(self._serve, fd, view, rest, writes)
            for _ in blocks[: self.settings.queue_depth]
        ]
        wait(parts)
        return sum(part.result() for part in parts)

    def close(self) -> None:
        """Wait for transfers in progress and end the threads."""
        self._pool.shutdown()

    def _serve(self, fd: int, memory: memoryview, rest: Iterator[IoBlock], writes: bool) -> int:
        try:
            return sum(self._move_block(fd, memory, block, writes) for block in rest)
        except BaseException:
            # Take the remaining blocks, so that the other threads do not begin them.
            for _ in rest:
                pass
            raise

    def _move_block(self, fd: int, memory: memoryview, block: IoBlock, writes: bool) -> int:
        own = memory[block.start : block.start + block.nbytes]
        if not block.bounces:
            return min(block.nbytes, self._complete(fd, own, block, writes))
        bounce = self._bounces.get()
        try:
            padded = bounce[: align_up(block.nbytes, self.align)]
            if writes:
                padded[: block.nbytes] = own
                padded[block.nbytes :] = bytes(len(padded) - block.nbytes)
            moved = min(block.nbytes, self._complete(fd, padded, block, writes))
            if not writes:
                own[:moved] = padded[:moved]
            return moved
        finally:
            self._bounces.put(bounce)

    def _complete(self, fd: int, memory: memoryview, block: IoBlock, writes: bool) -> int:
        """Repeat calls until all of `memory` is moved; stop early at the file's end only."""
        call = self.system.pwritev if writes else self.system.preadv
        done = retries = stalls = 0
        while done < len(memory):
            try:
                count = call(fd, [memory[done:]], block.start + done)
            except InterruptedError:
                continue
            except BlockingIOError:
                retries += 1
                if retries > _MOST_RETRIES:
                    raise
                time.sleep(0.001)
                continue
            reached = done + count
            if not writes and (count == 0 or reached >= block.nbytes):
                # A read ends with the file, whose end need not be padded.
                return reached
            before, done = done, reached
            if reached < len(memory):
                # O_DIRECT can only go on from a multiple of its unit.
                done -= reached % self.align
            stalls = 0 if done > before else stalls + 1
            if stalls == _MOST_STALLS and writes:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if stalls == _MOST_STALLS:
                # The file ends within a unit, and a repeated read gets no further.
                return reached
        return done


# Sizes to try as the unit of O_DIRECT; requests of less than the first are not worth it.
_UNITS: Final = (4096, 16384, 65536)


@frozen
class Direct:
    """`align_bytes` is the unit of O_DIRECT transfers, or 1 and the reason why there are none."""

    align_bytes: int
    reason: str = ""

    @property
    def flag(self) -> int:
        """Flags to add to those of open: O_DIRECT, or 0."""
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
            # Some file systems create the file before they refuse to open it.
            system.unlink(path)
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


def choose_transport(
    settings: DiskSettings, align: int, system: System
) -> tuple[AbstractTransport, str]:
    """Return io_uring if it is asked for, compiled and allowed; else threads, and the reason."""
    found, reason = kernels(), native_status().reason
    if not settings.uses_uring:
        reason = "uses_uring is False"
    elif found is not None:
        try:
            return RingTransport(settings, align, found.library), ""
        except OSError as error:
            reason = f"io_uring_setup: {error.strerror}"
    return ThreadTransport(settings, align, system), reason


@final
@define(eq=False)
class RingTransport(AbstractTransport):
    """Transfers by io_uring, with one ring per worker, of which each transfer uses one alone.

    The loop is in C and runs without the GIL.

    Raises:
        OSError: The system has no io_uring, or forbids it.
    """

    settings: DiskSettings
    align: int
    library: ctypes.CDLL
    # Rings that are free, each with its bounce memory for `queue_depth` blocks.
    _rings: SimpleQueue[Any] = field(factory=SimpleQueue, init=False)
    _finalizer: weakref.finalize = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._finalizer = weakref.finalize(self, _close, self.library, self._rings)
        for _ in range(self.settings.num_workers):
            handle = ctypes.c_void_p()
            status = self.library.zero_ring_open(self.settings.queue_depth, ctypes.byref(handle))
            if status:
                self.close()
                raise OSError(-status, os.strerror(-status))
            nbytes = self.settings.block_bytes * self.settings.queue_depth
            self._rings.put((handle, aligned_memory(nbytes, self.align)))

    def move(self, fd: int, memory: Tensor, *, writes: bool) -> int:
        """Move `memory` through a ring that is free; see `AbstractTransport.move`."""
        ring, bounce = self._rings.get()
        try:
            request = Transfer(
                fd=fd,
                writes=writes,
                memory=memory.data_ptr(),
                nbytes=memory.nbytes,
                block_bytes=self.settings.block_bytes,
                align=self.align,
                bounce=address_of(bounce),
                depth=self.settings.queue_depth,
            )
            moved = self.library.zero_ring_move(ring, ctypes.byref(request))
        finally:
            self._rings.put((ring, bounce))
        if moved < 0:
            raise OSError(-moved, os.strerror(-moved))
        return moved

    def close(self) -> None:
        """Close the rings, of which no transfer may use one any more. Again: nothing happens."""
        self._finalizer()


def _close(library: ctypes.CDLL, rings: SimpleQueue[Any]) -> None:
    while not rings.empty():
        library.zero_ring_close(rings.get()[0])
