"""The only place that names private functions of torch; each has a test that names it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def is_in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread right now."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that is running now has ended without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def as_subclass_sharing_memory(cls: type[Tensor], tensor: Tensor) -> Tensor:
    """`tensor` as an instance of `cls`, without autograd history."""
    return torch.Tensor._make_subclass(cls, tensor)


def plain_access() -> AbstractContextManager[None]:
    """Inside, tensors of subclasses are plain tensors: what is ours looks at what is ours."""
    return torch._C.DisableTorchFunctionSubclass()


def plain_call(func: Callable, args: tuple, kwargs: dict) -> object:
    """Call a torch function as if no argument were of a tensor subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def plainly() -> AbstractContextManager[None]:
    """Run torch functions without the torch function modes that are active, `device` included."""
    return torch._C.DisableTorchFunction()


def is_viewed(tensor: Tensor) -> bool:
    """Whether another tensor, or an array, shares this tensor's memory."""
    storage = tensor.untyped_storage()  # it counts too
    return torch._C._storage_Use_Count(storage._cdata) > 2


def swap_memory(tensor: Tensor, other: Tensor) -> None:
    """Exchange what two tensors are, whatever their devices; the Python objects stay.

    `torch.utils.swap_tensors` does the same, and also exchanges attributes, and refuses a tensor
    that has weak references, such as the parameters of an LSTM.
    """
    torch._C._swap_tensor_impl(tensor, other)
