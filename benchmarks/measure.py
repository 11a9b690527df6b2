"""Memory of one process: resident now, at its peak, and of live tensors."""

from __future__ import annotations

import gc
import re
import warnings
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Environment of a process, in which glibc's malloc returns freed memory to the system at once.
RETURNS_FREED: Final = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def resident_bytes() -> int:
    """Return the physical memory of this process."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Return the most physical memory of this process since `reset_peak()`."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Reset the peak to the memory that is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def moved_disk_bytes() -> int:
    """Return the bytes that this process read from disks and wrote to them, without cached ones."""
    counts = dict(re.findall(r"^(\w+): (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE))
    return int(counts["read_bytes"]) + int(counts["write_bytes"])


def live_tensor_bytes() -> int:
    """Return the bytes of all storages that Python can reach through a tensor, each counted once.

    Nothing is subtracted. Memory that only C++ refers to, such as DDP's buckets, is not seen.
    """
    gc.collect()
    nbytes_at: dict[int, int] = {}
    # A sharded parameter may be of a subclass that raises if it is used, so functions of
    # subclasses are disabled.
    with torch._C.DisableTorchFunctionSubclass(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found in gc.get_objects():
            if not issubclass(type(found), Tensor):
                continue
            for tensor in (found, found.grad if found.is_leaf else None):
                if tensor is None or not _has_storage(tensor):
                    continue
                storage = tensor.untyped_storage()
                address = storage.data_ptr()
                nbytes_at[address] = max(nbytes_at.get(address, 0), storage.nbytes())
    return sum(nbytes_at.values())


def _has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor has memory itself; tensors in a wrapper are found on their own."""
    return (
        not is_traceable_wrapper_subclass(tensor)
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__  # as a guard's is not
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
    )


def _status_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found, f"this kernel does not report {name} in /proc/self/status"
    return int(found[1]) * 1024
