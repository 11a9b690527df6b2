"""Memory of another process of this host, read by `process_vm_readv(2)` of Linux.

The call needs the right to trace the other process: the same user and, under Yama's default, the
other's consent, which `allow_readers` gives.
"""

from __future__ import annotations

import ctypes
import os
import sys
from errno import EFAULT, ESRCH
from typing import Any, Final

from torch import Tensor

from zero_comm.calls import CAUSES, in_lines

# Environment variable; with 0, ranks send messages in place of reading memory.
SWITCH: Final = "ZERO_COMM_PEER_MEMORY"

_PR_SET_PTRACER: Final = 0x59616D61
_PR_SET_PTRACER_ANY: Final = ctypes.c_ulong(-1)


class _IoVector(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def _find_call() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is not None:
        spans, count = ctypes.POINTER(_IoVector), ctypes.c_ulong
        call.argtypes = (ctypes.c_int, spans, count, spans, count, ctypes.c_ulong)
        call.restype = ctypes.c_ssize_t
    return call


_READ: Final = _find_call()


def is_supported() -> bool:
    """Return whether this system has the call. Only a read shows whether it is permitted."""
    return _READ is not None


def allow_readers(ancestor: int | None) -> None:
    """Let a process and its descendants read this one's memory, where Yama would refuse it. Local.

    Args:
        ancestor: Process id; None lets every process of the same user.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    # Where there is no Yama, the call fails and is not needed.
    if prctl is not None:
        who = _PR_SET_PTRACER_ANY if ancestor is None else ctypes.c_ulong(ancestor)
        prctl(_PR_SET_PTRACER, who, 0, 0, 0)


def read(pid: int, address: int, *, into: int, num_bytes: int) -> None:
    """Copy `num_bytes` from `address` of process `pid` to `into` of this one.

    Raises:
        ProcessLookupError: The process has ended.
        OSError: Not permitted, or no such memory there.
    """
    done = 0
    # One call reads 2 GiB at most, and may read less.
    while done < num_bytes:
        rest = num_bytes - done
        local, remote = _IoVector(into + done, rest), _IoVector(address + done, rest)
        count = _READ(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if count <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        done += count


def why(error: OSError) -> str:
    """Why a process could not be read, and what can be done about it."""
    if error.errno == ESRCH:
        return in_lines("its process has ended", CAUSES)
    if error.errno == EFAULT:
        return "no such memory; the process is ending, or has given the memory away"
    return f"{error}; set {SWITCH}=0 on every rank, and values travel as messages"


def read_into(tensor: Tensor, pid: int, address: int) -> None:
    """Fill a contiguous CPU tensor from `address` of process `pid`. Raises as `read` does."""
    read(pid, address, into=tensor.data_ptr(), num_bytes=tensor.nbytes)


def read_word(pid: int, address: int) -> int:
    """A signed 64-bit integer from a process's memory. Raises OSError."""
    word = ctypes.c_int64()
    read(pid, address, into=ctypes.addressof(word), num_bytes=ctypes.sizeof(word))
    return word.value
