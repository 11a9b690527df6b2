"""The only place that names torch's private functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor)


def as_subclass_sharing_memory(cls: type[T], tensor: Tensor) -> T:
    """`tensor` as an instance of `cls`, without autograd history."""
    return torch.Tensor._make_subclass(cls, tensor)


def plain_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function as if no argument were of a tensor subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
