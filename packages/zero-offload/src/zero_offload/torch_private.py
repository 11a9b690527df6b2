"""The only place that names private functions and attributes of torch, or ones newer than 2.11.

Each exists in every version that `docs/versions.md` lists, unless a comment says which have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor)


def accelerator() -> torch.device | None:
    """Return the type of accelerator this process can use, without an index; None: only a CPU.

    A torch that is built for CUDA names that accelerator on a machine without a GPU too, unless it
    is asked to look. `torch.accelerator.current_device_index()` has the index, and initializes the
    device.
    """
    return torch.accelerator.current_accelerator(check_available=True)


def as_subclass_sharing_memory(cls: type[T], tensor: Tensor) -> T:
    """Return `tensor` as an instance of `cls` on the same memory, without autograd history."""
    return torch.Tensor._make_subclass(cls, tensor)


def plain_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function as if no argument were of a tensor subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
