"""`torch.sim`: what `torch.cuda` is for CUDA, as far as torch and its users ask for it.

torch finds these functions by their names; most only pass on to the extension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Event, Generator, Stream, Tensor

from simulated_device._extension import extension

__all__ = ["Event", "Stream"]

DeviceLike: TypeAlias = torch.device | str | int | None


def is_available() -> bool:
    """Return True: there is always a simulated device."""
    return True


def is_initialized() -> bool:
    """Return True: nothing is left to initialize after the import."""
    return True


def _lazy_init() -> None:
    """Do nothing. Only a device that has this function counts as initialized for torch 2.11."""


def _is_in_bad_fork() -> bool:
    """Return whether this process is a fork of one that had the device, which it cannot use."""
    return extension.is_forked()


# ---- devices and streams


def device_count() -> int:
    """Return the number of devices: SIM_DEVICES, or one."""
    return extension.device_count()


def current_device() -> int:
    """Return the index of this thread's device."""
    return extension.current_device()


def set_device(device: DeviceLike) -> None:
    """Make a device this thread's current one."""
    extension.set_device(_index_of(device))


class device:
    """A context in which a device is this thread's current one."""

    def __init__(self, device: DeviceLike):
        self._index = _index_of(device)
        self._before: list[int] = []  # one for each time it was entered and not left

    def __enter__(self) -> None:
        self._before.append(current_device())
        set_device(self._index)

    def __exit__(self, *_: object) -> None:
        set_device(self._before.pop())


def synchronize(device: DeviceLike = None) -> None:
    """Wait until a device has run all that was launched on it."""
    extension.synchronize(_index_of(device))


def current_stream(device: DeviceLike = None) -> Stream:
    """Return this thread's current stream of a device."""
    return torch.accelerator.current_stream(_device_of(device))


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Make a stream the current one; None changes nothing."""
    if stream is None:
        yield
        return
    with stream:
        yield


# ---- memory


def empty_cache() -> None:
    """Return the memory that is cached for streams to the device; waits for all of them."""
    extension.empty_cache()


def memory_allocated(device: DeviceLike = None) -> int:
    """Return the bytes of tensors, rounded up to whole blocks."""
    return torch.accelerator.memory_allocated(_device_of(device))


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Return the largest `memory_allocated` since the peak was reset."""
    return torch.accelerator.max_memory_allocated(_device_of(device))


def memory_reserved(device: DeviceLike = None) -> int:
    """Return the bytes of tensors and of cached memory."""
    return torch.accelerator.memory_reserved(_device_of(device))


def max_memory_reserved(device: DeviceLike = None) -> int:
    """Return the largest `memory_reserved` since the peak was reset."""
    return torch.accelerator.max_memory_reserved(_device_of(device))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Make the present values of memory statistics their peaks."""
    torch.accelerator.reset_peak_memory_stats(_device_of(device))


def host_register(address: int, size: int) -> None:
    """Treat `size` bytes of the host's memory as page-locked, like cudaHostRegister."""
    extension.host_register(address, size)


def host_unregister(address: int) -> None:
    """Undo `host_register`."""
    extension.host_unregister(address)


# ---- random numbers


def __getattr__(name: str) -> Sequence[Generator]:
    if name == "default_generators":
        return tuple(extension.default_generator(index) for index in range(device_count()))
    raise AttributeError(f"module 'torch.sim' has no attribute {name!r}")


def get_rng_state(device: DeviceLike = "sim") -> Tensor:
    """Return the state of a device's default generator."""
    return extension.default_generator(_index_of(device)).get_state()


def set_rng_state(new_state: Tensor, device: DeviceLike = "sim") -> None:
    """Restore what `get_rng_state` returned."""
    extension.default_generator(_index_of(device)).set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    """Return the states of all devices' default generators."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Sequence[Tensor]) -> None:
    """Restore what `get_rng_state_all` returned."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seed the current device's default generator."""
    extension.default_generator(current_device()).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed all devices' default generators; torch.manual_seed() calls this."""
    for index in range(device_count()):
        extension.default_generator(index).manual_seed(int(seed))


def initial_seed() -> int:
    """Return the seed of the current device's default generator."""
    return extension.default_generator(current_device()).initial_seed()


# ---- autocast


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types that autocast takes."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return True: kernels are the CPU's, which has bfloat16."""
    return True


def _index_of(device: DeviceLike) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def _device_of(device: DeviceLike) -> torch.device:
    return torch.device("sim", _index_of(device))
