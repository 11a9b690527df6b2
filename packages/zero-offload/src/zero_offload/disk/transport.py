"""Moving bytes between memory and an open file: the plan in blocks, and by threads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, final

import numpy as np
from attrs import define, field, frozen
from torch import Tensor

from zero_offload._native import kernels, native_status

from .folder import SYSTEM, System
from .settings import DiskSettings

_MOST_RETRIES: Final = 2000  # of a request that the kernel is too busy for, 1 ms apart
_MOST_STALLS: Final = 3  # of a request that moves less than one unit


@frozen
class Transfer:
    """`nbytes` from or to `address`, at `offset` in an open file.

    `align` is what O_DIRECT asks of addresses, offsets and sizes (1 without); `offset` is a
    multiple of it. The memory is borrowed until the transfer ends.
    """

    fd: int
    writes: bool
    address: int
    nbytes: int
    offset: int = 0
    align: int = 1


@frozen
class Block:
    """A run of bytes within a transfer, moved by one request, in place or through a bounce."""

    start: int
    nbytes: int
    bounces: bool


class AbstractTransport(ABC):
    """A way of moving bytes. Safe to use from several threads."""

    @abstractmethod
    def move(self, transfer: Transfer) -> int:
        """Move all of it. Blocks, without the GIL where it matters.

        An odd end is written padded with zeros to `align`, and read so.

        Returns:
            The bytes moved: fewer where the file ends early.

        Raises:
            OSError: The system refused; nothing of the transfer is under way any more.
        """

    @abstractmethod
    def register(self, buffers: Sequence[Tensor]) -> str:
        """Keep these mapped in the kernel in place of earlier ones. Returns why not, or ""."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is under way and let go of everything."""


def plan_blocks(address: int, nbytes: int, *, block_bytes: int, align: int) -> Iterator[Block]:
    """Whole blocks of aligned memory in place; an odd end, or any other memory, bounced.

    `zero_io.cpp` cuts by the same rule.
    """
    start = 0
    while start < nbytes:
        size = min(block_bytes, nbytes - start)
        is_aligned = (address + start) % align == 0
        if is_aligned and size >= align:
            size -= size % align
        yield Block(start, size, not is_aligned or size < align)
        start += size


def align_up(nbytes: int, align: int) -> int:
    """The next multiple of `align`."""
    return -(-nbytes // align) * align


def aligned_memory(nbytes: int, align: int) -> memoryview:
    """Private memory that starts on a multiple of `align`; touched when used."""
    mapping = mmap.mmap(-1, nbytes + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # advice
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(mapping)
    start = -address_of(memory) % align
    return memory[start : start + nbytes]


def address_of(memory: memoryview) -> int:
    """Where it starts."""
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
        for _ in range(num_threads):  # one a thread
            self._bounces.put(aligned_memory(self.settings.block_bytes, self.align))

    def move(self, transfer: Transfer) -> int:
        """See `AbstractTransport.move`."""
        blocks = plan_blocks(
            transfer.address,
            transfer.nbytes,
            block_bytes=self.settings.block_bytes,
            align=transfer.align,
        )
        # At most queue_depth threads serve one transfer, and take its blocks in turns: a generator
        # may not be entered twice, so they come through a queue.
        queue: SimpleQueue[Block] = SimpleQueue()
        for block in blocks:
            queue.put(block)
        num_parts = min(self.settings.queue_depth, queue.qsize())
        parts = [self._pool.submit(self._serve, transfer, queue) for _ in range(num_parts)]
        wait(parts)
        return sum(part.result() for part in parts)

    def register(self, buffers: Sequence[Tensor]) -> str:
        """There is nothing to register with."""
        return "threads use pread and pwrite, which know no registered buffers"

    def close(self) -> None:
        """See `AbstractTransport.close`."""
        self._pool.shutdown()

    def _serve(self, transfer: Transfer, queue: SimpleQueue[Block]) -> int:
        moved = 0
        try:
            while True:
                try:
                    block = queue.get_nowait()
                except Empty:
                    return moved
                moved += self._move_block(transfer, block)
        except BaseException:
            with contextlib.suppress(Empty):
                while True:  # what has not begun need not
                    queue.get_nowait()
            raise

    def _move_block(self, transfer: Transfer, block: Block) -> int:
        own = _view(transfer.address + block.start, block.nbytes)
        if not block.bounces:
            return min(block.nbytes, self._complete(transfer, block, own))
        bounce = self._bounces.get()
        try:
            padded = bounce[: align_up(block.nbytes, transfer.align)]
            if transfer.writes:
                padded[: block.nbytes] = own
                padded[block.nbytes :] = bytes(len(padded) - block.nbytes)
            moved = min(block.nbytes, self._complete(transfer, block, padded))
            if not transfer.writes:
                own[:moved] = padded[:moved]
            return moved
        finally:
            self._bounces.put(bounce)

    def _complete(self, transfer: Transfer, block: Block, memory: memoryview) -> int:
        """Move all of `memory`, however little a call moves; stops early at the file's end only."""
        call = self.system.pwritev if transfer.writes else self.system.preadv
        done = retries = stalls = 0
        while done < len(memory):
            try:
                count = call(transfer.fd, [memory[done:]], transfer.offset + block.start + done)
            except InterruptedError:
                continue
            except BlockingIOError:
                retries += 1
                if retries > _MOST_RETRIES:
                    raise
                time.sleep(0.001)
                continue
            reached = done + count
            if not transfer.writes and (count == 0 or reached >= block.nbytes):
                return reached  # the file's end; it need not be padded
            before, done = done, reached
            if reached < len(memory):
                done -= reached % transfer.align  # O_DIRECT goes on from where it may
            stalls = 0 if done > before else stalls + 1
            if stalls == _MOST_STALLS and transfer.writes:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if stalls == _MOST_STALLS:
                return reached  # does not grow: an end that is not a multiple of align
        return done


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


# ---- Whether a file system takes O_DIRECT, and in which units: tried, not believed ----


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


# ---- Moving bytes through io_uring ----


_ABI: Final = 1
_MOST_REGION_BYTES: Final = 2**30  # the kernel's


class _Transfer(ctypes.Structure):
    _fields_ = (
        ("fd", ctypes.c_int32),
        ("writes", ctypes.c_int32),
        ("memory", ctypes.c_void_p),
        ("nbytes", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("block_bytes", ctypes.c_int64),
        ("align", ctypes.c_int64),
        ("bounce", ctypes.c_void_p),
        ("depth", ctypes.c_int32),
    )


@define(eq=False)
class _Ring:
    handle: ctypes.c_void_p
    bounce: memoryview


def io_library() -> tuple[ctypes.CDLL | None, str]:
    """The native library with its disk I/O declared, or None and why."""
    found = kernels()
    if found is None:
        return None, native_status().reason
    reason = declare_io(found.library)
    return (None, reason) if reason else (found.library, "")


def choose_transport(
    settings: DiskSettings, align: int, library: ctypes.CDLL | None, reason: str, system: System
) -> tuple[AbstractTransport, str]:
    """io_uring if it is asked for, compiled and allowed; else threads, and why."""
    if not settings.uses_uring:
        reason = "uses_uring is False"
    elif library is not None:
        try:
            return RingTransport(settings, align, library), ""
        except OSError as error:
            reason = f"io_uring_setup: {error.strerror}"
    return ThreadTransport(settings, align, system), reason


def declare_io(library: ctypes.CDLL) -> str:
    """Tell ctypes the signatures of `zero_io.h`. Returns why the library does not fit, or ""."""
    try:
        abi = library.zero_io_abi()
    except AttributeError:
        return "the native library has no disk I/O"
    if abi != _ABI:
        return f"the native library's disk I/O has version {abi}, this package needs {_ABI}"
    pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    library.zero_ring_open.argtypes = [int32, ctypes.POINTER(pointer)]
    library.zero_ring_close.argtypes = [pointer]
    library.zero_ring_close.restype = None
    library.zero_ring_register.argtypes = [
        pointer,
        ctypes.POINTER(pointer),
        ctypes.POINTER(int64),
        int32,
    ]
    library.zero_ring_move.argtypes = [pointer, ctypes.POINTER(_Transfer)]
    library.zero_ring_move.restype = int64
    library.zero_crc32c.argtypes = [ctypes.c_uint32, pointer, int64]
    library.zero_crc32c.restype = ctypes.c_uint32
    return ""


@final
@define(eq=False)
class RingTransport(AbstractTransport):
    """One ring a worker; a transfer has one to itself, and the C loop runs without the GIL.

    Raises:
        OSError: The system has no io_uring, or forbids it.
    """

    settings: DiskSettings
    align: int
    library: ctypes.CDLL
    _rings: SimpleQueue[_Ring] = field(factory=SimpleQueue, init=False)
    _kept: tuple[Tensor, ...] = field(default=(), init=False)  # alive while registered
    _finalizer: weakref.finalize = field(init=False)
    _registers: threading.Lock = field(factory=threading.Lock, init=False)  # who takes all rings

    def __attrs_post_init__(self) -> None:
        self._finalizer = weakref.finalize(self, _close, self.library, self._rings)
        for _ in range(self.settings.num_workers):
            handle = ctypes.c_void_p()
            status = self.library.zero_ring_open(self.settings.queue_depth, ctypes.byref(handle))
            if status:
                self.close()
                raise OSError(-status, os.strerror(-status))
            nbytes = self.settings.block_bytes * self.settings.queue_depth
            self._rings.put(_Ring(handle, aligned_memory(nbytes, self.align)))

    def move(self, transfer: Transfer) -> int:
        """See `AbstractTransport.move`."""
        ring = self._rings.get()
        try:
            request = _Transfer(
                fd=transfer.fd,
                writes=transfer.writes,
                memory=transfer.address,
                nbytes=transfer.nbytes,
                offset=transfer.offset,
                block_bytes=self.settings.block_bytes,
                align=transfer.align,
                bounce=address_of(ring.bounce),
                depth=self.settings.queue_depth,
            )
            moved = self.library.zero_ring_move(ring.handle, ctypes.byref(request))
        finally:
            self._rings.put(ring)
        if moved < 0:
            raise OSError(-moved, os.strerror(-moved))
        return moved

    def register(self, buffers: Sequence[Tensor]) -> str:
        """See `AbstractTransport.register`. Waits until no transfer is under way."""
        regions = [
            (buffer.data_ptr() + start, min(_MOST_REGION_BYTES, buffer.nbytes - start))
            for buffer in buffers
            for start in range(0, buffer.nbytes, _MOST_REGION_BYTES)
        ]
        starts = (ctypes.c_void_p * len(regions))(*(start for start, _ in regions))
        sizes = (ctypes.c_int64 * len(regions))(*(size for _, size in regions))
        with self._registers:
            rings = [self._rings.get() for _ in range(self.settings.num_workers)]
        try:
            self._kept = tuple(buffers)
            for ring in rings:
                status = self.library.zero_ring_register(ring.handle, starts, sizes, len(regions))
                if status:
                    for each in rings:
                        self.library.zero_ring_register(each.handle, None, None, 0)
                    self._kept = ()
                    return (
                        f"io_uring keeps no buffers of {sum(sizes)} bytes: {os.strerror(-status)}. "
                        "RLIMIT_MEMLOCK (`ulimit -l`) limits them, once for each worker"
                    )
        finally:
            for ring in rings:
                self._rings.put(ring)
        return ""

    def close(self) -> None:
        """See `AbstractTransport.close`."""
        self._finalizer()
        self._kept = ()


def _close(library: ctypes.CDLL, rings: SimpleQueue[_Ring]) -> None:
    while not rings.empty():
        library.zero_ring_close(rings.get().handle)
