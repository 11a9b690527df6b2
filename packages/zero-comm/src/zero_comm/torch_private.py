"""The only place that names private functions and attributes of torch, or ones newer than 2.11.

Each exists in every version that `docs/versions.md` lists, unless a comment says which have it.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._device import DeviceContext, _device_constructors

T = TypeVar("T")

# New names of torch 2.13, which warns about the old ones; 2.11 and 2.12 have only the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# Returns whether a profiler runs, whether it writes events or NVTX ranges.
is_profiled = torch._C._autograd._profiler_enabled


def unrecorded(launch: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Begin a message without an event in a profiler that runs.

    gloo ends the event of a message when that is waited for. If the profiler has ended before, it
    writes to memory that is freed (torch 2.13): the process ends by a signal, sometime later.
    """
    torch._C._autograd._enable_record_function(False)
    try:
        return launch(*args, **kwargs)
    finally:
        torch._C._autograd._enable_record_function(True)


def accelerator() -> torch.device | None:
    """Return the type of accelerator this process can use, without an index; None: only a CPU.

    A torch that is built for CUDA names that accelerator on a machine without a GPU too, unless it
    is asked to look. `torch.accelerator.current_device_index()` has the index, and initializes the
    device.
    """
    return torch.accelerator.current_accelerator(check_available=True)


DefaultDeviceMode = DeviceContext  # creates tensors on its `device` where a call names none


def creates_tensor(function: Any) -> bool:
    """Return whether a function of torch creates tensors on the default device."""
    return function in _device_constructors()


def timeout_of(process_group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long a collective of these ranks may take on tensors of that device.

    A backend of a package apart need not say. It is given that of the group's other backend then,
    if there is one, as of gloo for the CPU, and torch's default else.
    """
    kinds = (device, *process_group._device_types)
    every = (getattr(process_group._get_backend(kind), "options", None) for kind in kinds)
    options = next(filter(None, every), None)
    return default_pg_timeout if options is None else options._timeout


def sequence_number(backend: Any) -> int:
    """Return how many collectives a backend of a process group has counted; 0 if it does not count.

    That of NCCL counts a batch of messages to and from single ranks as one of them.
    """
    try:
        return backend._get_sequence_number_for_group()
    except RuntimeError:
        return 0


def backend_of(process_group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend with which a process group serves a device."""
    return process_group._get_backend(device)


def num_gloo_devices(process_group: dist.ProcessGroup) -> int:
    """Return over how many network devices gloo spreads the messages of these ranks, by tag."""
    options: Any = process_group._get_backend(torch.device("cpu")).options
    return len(options._devices)


def default_store() -> Any:
    """The store at which the ranks of the job met.

    Raises:
        ValueError: torch.distributed is not initialised, or not any more.
    """
    return _get_default_store()


# A gloo thread that has finished a collective drops its tensors under Python's lock. If it comes to
# that while the interpreter is already ending, the thread is ended in the middle of C++ and takes
# the process with it ("terminate called without an active exception", in one exit of five right
# after a collective). It needs the lock for a moment only, while Python's end is still ahead.
_LAST_MOMENT_S: Final = 0.05


@cache
def let_gloo_finish_at_exit() -> None:
    """Give gloo's threads the interpreter's lock once more before it ends. Once per process."""
    atexit.register(time.sleep, _LAST_MOMENT_S)
