"""Private names of torch, where no public one does the job."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

Func = TypeVar("Func", bound=Callable[..., Any])


def current_backward() -> int:
    """Which backward is running on this thread, by number; -1 if none is."""
    return torch._C._current_graph_task_id()


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory was written in place; -1 where nobody counts (inference mode)."""
    return -1 if tensor.is_inference() else tensor._version


def uncompiled(function: Func) -> Func:
    """`function` runs as it is where torch.compile meets it, with all that it calls.

    Unlike `torch.compiler.disable` it does not import the compiler, which takes a second.
    """
    return torch._disable_dynamo(function)  # type: ignore[return-value]


def without_modes() -> AbstractContextManager[Any]:
    """Inside, no dispatch mode sees what is computed: neither ours nor others'."""
    return _disable_current_modes()


def inner_tensors(tensor: Tensor) -> list[Tensor] | None:
    """What a wrapper (DTensor, a jagged tensor) holds; None if it is no wrapper."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def is_plain(tensor: Tensor) -> bool:
    """Whether it is bits in memory, and nothing else."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and "FakeTensor" not in type(tensor).__name__  # its module takes a while to import
    )


def storage_of(tensor: Tensor) -> StorageWeakRef | None:
    """Its memory, as a key: views have the same, and it is no other's while the key lives."""
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return None
    return StorageWeakRef(tensor.untyped_storage())
