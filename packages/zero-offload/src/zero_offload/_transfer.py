"""Moving bytes between memory and an open file: the plan in blocks, and by threads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import Final, final

import numpy as np
from attrs import define, field, frozen
from torch import Tensor

from ._disk_settings import DiskSettings
from ._system import SYSTEM, System

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
