"""Host memory at exact size: page-aligned, page-locked for an accelerator, in one budget."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final, final

import torch
from attrs import define, field
from torch import Tensor

from zero_offload.errors import BudgetError
from zero_offload.torch_private import accelerator

from .budget import PROCESS_BUDGET, HostBudget
from .numa import nodes_of_process, spread

_LOG: Final = logging.getLogger(__name__)
PAGE_BYTES: Final = mmap.PAGESIZE
_HUGE_BYTES: Final = 2 * 2**20
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
# cudaHostRegisterPortable: memory is page-locked for every device, not for the current one only.
_PORTABLE: Final = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@final
@define(eq=False)
class HostArena:
    """Hands out host memory as tensors, each a mapping of its own rounded up to a page.

    The memory lives until the last tensor that views it dies, and is then given back to the system
    and to the budget. It starts on a page, as O_DIRECT, vector code and page-locking like it, is
    zero, and is *there* when `allocate` returns: each page has been touched, so that a machine
    that is full says so then, and not by ending the process later. Pages are huge where the kernel
    grants that. With more than one memory node under this process its pages alternate between them.

    Args:
        name: Name under which the bytes are counted, and listed in a BudgetError.
        is_pinned: Page-lock where torch sees an accelerator; plain memory where not. Pages are
            registered with CUDA; for other kinds they are of torch's `pin_memory`: a page more,
            and its allocator may round sizes up and keep what is freed for later.
        budget: What the bytes are counted in; one for the process unless said otherwise.
    """

    name: str = "arena"
    is_pinned: bool = True
    budget: HostBudget = field(default=PROCESS_BUDGET, repr=False)
    pin_reason: str = field(default="", init=False)
    """Why memory is not page-locked; empty where it is, or nothing has been allocated yet."""
    spread_reason: str = field(default="", init=False)
    """Why pages do not alternate between several nodes; empty where they do, or there is one."""

    def allocate(
        self, numel: int, *, dtype: torch.dtype = torch.uint8, name: str | None = None
    ) -> Tensor:
        """Allocate `numel` elements: 1-D, zero, on the CPU. Local; blocks while they are touched.

        Args:
            numel: Number of elements; 0 gives an empty tensor without memory.
            dtype: Dtype of the elements.
            name: Name that the bytes are counted for, if not the arena's.

        Raises:
            BudgetError: The budget or the machine has too little; it lists the bytes by name.
        """
        if numel < 0:
            raise ValueError(f"numel must be 0 or more, got {numel}")
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        holder = self.name if name is None else name
        mapped_bytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        with self.budget.taking(holder, mapped_bytes):
            address, undo = self._take(mapped_bytes, holder)
        how = "not page-locked" if self.pin_reason else "page-locked"
        _LOG.debug("%d bytes for %s, %s: %s", mapped_bytes, holder, how, self.pin_reason)
        owner = (ctypes.c_char * nbytes).from_address(address)
        # The tensor's storage refers to the owner. At exit, tensors may still use the memory, and
        # the end of the process releases it.
        end: Any = weakref.finalize(owner, _release, undo, self.budget, holder, mapped_bytes)
        end.atexit = False
        return torch.frombuffer(owner, dtype=dtype)

    def _take(self, nbytes: int, holder: str) -> tuple[int, Callable[[], None]]:
        """Return the address of memory, page-locked if it can be, and what gives it back."""
        device = accelerator() if self.is_pinned else None
        if device is None:
            self.pin_reason = (
                "torch sees no accelerator" if self.is_pinned else "is_pinned is False"
            )
        elif device.type != "cuda":
            try:
                pinned = [
                    torch.zeros(
                        nbytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu"
                    )
                ]
            except (RuntimeError, NotImplementedError) as error:
                # The device has no page-locked memory.
                self.pin_reason = f"pin_memory of {nbytes} bytes for {device.type}: {error}"
            else:
                self.pin_reason, self.spread_reason = "", "torch places what it pins"
                address = -(-pinned[0].data_ptr() // PAGE_BYTES) * PAGE_BYTES
                return address, partial(_drop, pinned, torch.accelerator.current_device_index())
        address, self.spread_reason = _map(nbytes, holder)
        if device is not None and device.type == "cuda":
            self.pin_reason = _register(address, nbytes)
            if not self.pin_reason:
                index = torch.accelerator.current_device_index()
                return address, partial(_unregister, address, nbytes, index)
        return address, partial(_unmap, address, nbytes)


def _register(address: int, nbytes: int) -> str:
    """Page-lock memory with CUDA. Returns why that failed, or an empty string."""
    cudart: Any = torch.cuda.cudart()
    status = cudart.cudaHostRegister(address, nbytes, _PORTABLE)
    if int(status) == 0:
        return ""
    # CUDA keeps the error, and would report it for the next kernel. This call takes it.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return f"cudaHostRegister of {nbytes} bytes: {cudart.cudaGetErrorString(status)}"


def _map(nbytes: int, holder: str) -> tuple[int, str]:
    """Map and touch anonymous memory; return its address, and why it is not spread over nodes."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc.mmap(None, nbytes, protection, kind, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        why = os.strerror(ctypes.get_errno())
        raise BudgetError(
            f"{holder!r} asks for {nbytes} bytes of host memory, and the system refuses to map "
            f"them: {why}. Look at `ulimit -v` and vm.overcommit_memory.",
            nbytes=nbytes,
        )
    reason = spread(address, nbytes, nodes_of_process())
    if nbytes >= _HUGE_BYTES:
        # Huge pages are optional: a kernel may refuse them.
        _libc.madvise(address, nbytes, _MADV_HUGEPAGE)
    if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE):
        # EINVAL comes from a kernel before 5.14, which does not know the advice.
        if ctypes.get_errno() != errno.EINVAL:
            why = os.strerror(ctypes.get_errno())
            _libc.munmap(address, nbytes)
            raise BudgetError(
                f"{holder!r} asks for {nbytes} bytes of host memory, and the system ran out while "
                f"providing them: {why}. Other processes use the other memory; end some, or "
                "allocate less.",
                nbytes=nbytes,
            )
        ctypes.memset(address, 0, nbytes)
    return address, reason


# NOTE(copies): a copy from or to page-locked memory may still be under way when the last tensor of
# it goes, which happens in any thread. The device that is waited for is the one that was current
# when the memory was taken. In another thread the first device is current, which is another rank's.


def _unregister(address: int, nbytes: int, device_index: int) -> None:
    torch.accelerator.synchronize(device_index)  # see NOTE(copies)
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(address)
    _unmap(address, nbytes)


def _drop(pinned: list[Tensor], device_index: int) -> None:
    torch.accelerator.synchronize(device_index)  # see NOTE(copies)
    pinned.clear()


def _unmap(address: int, nbytes: int) -> None:
    _libc.munmap(address, nbytes)


def _release(undo: Callable[[], None], budget: HostBudget, holder: str, nbytes: int) -> None:
    undo()
    budget.give_back(holder, nbytes)
