"""Private names of torch, where no public one does the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Func = TypeVar("Func", bound=Callable[..., Any])


def current_backward() -> int:
    """Which backward is running on this thread, by number; -1 if none is."""
    return torch._C._current_graph_task_id()


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory was written in place; -1 where nobody counts (inference mode)."""
    return -1 if tensor.is_inference() else tensor._version


def set_version(tensor: Tensor, version: int) -> None:
    """Say that a tensor was written so often; -1 says nothing."""
    if version != -1:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def hooks_save_tensors() -> bool:
    """Whether saved-tensor hooks surround this: an enclosing checkpoint's, or anybody's."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def uncompiled(function: Func) -> Func:
    """`function` runs as it is where torch.compile meets it, with all that it calls.

    Unlike `torch.compiler.disable` it does not import the compiler, which takes a second.
    """
    return torch._disable_dynamo(function)  # type: ignore[return-value]
