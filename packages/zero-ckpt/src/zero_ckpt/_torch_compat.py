"""Private names of torch, where no public one does the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def current_backward() -> int:
    """Which backward is running on this thread, by number; -1 if none is."""
    return torch._C._current_graph_task_id()


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory was written in place; -1 where nobody counts (inference mode)."""
    return -1 if tensor.is_inference() else tensor._version


def uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """Call it where torch.compile is tracing: the graph breaks, and the call runs as it is.

    Unlike `torch.compiler.disable` it does not import the compiler where nobody compiles.
    """
    return torch._disable_dynamo(function)(*args)
