"""Moving bytes through io_uring: the ctypes side of `csrc/zero_io.h`, and the choice of it."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Final, final

from attrs import define, field
from torch import Tensor

from ._disk_settings import DiskSettings
from ._native import kernels, native_status
from ._system import System
from ._transfer import AbstractTransport, ThreadTransport, Transfer, address_of, aligned_memory

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
