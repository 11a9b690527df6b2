"""Optimizer state of any nesting as tensors and words about them, and never as pickled objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._errors import StateError


def describe(value: Any, tensors: list[Tensor]) -> Any:
    """What JSON can say of a value. Its tensors are appended to the list, in order.

    Raises:
        StateError: It holds something that is no tensor, number, string, None, list, tuple or dict.
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise StateError(f"expected dense tensors, got layout {value.layout}")
        tensors.append(value)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if value is None or type(value) in {bool, int, float, str}:
        return ["plain", value]
    if type(value) in {list, tuple}:
        return [type(value).__name__, [describe(item, tensors) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[describe(k, []), describe(v, tensors)] for k, v in value.items()]]
    raise StateError(
        f"expected tensors, numbers, strings, None, and lists, tuples and dicts of these, got a "
        f"{type(value).__name__}, which would have to be pickled to travel"
    )


def rebuild(said: Any, tensors: Iterator[Any]) -> Any:
    """The value that was described, of these tensors, or of what stands for them."""
    kind, what, *_ = said
    if kind == "tensor":
        return next(tensors)
    if kind == "plain":
        return what
    if kind == "dict":
        return {rebuild(k, tensors): rebuild(v, tensors) for k, v in what}
    items = [rebuild(item, tensors) for item in what]
    return items if kind == "list" else tuple(items)


def tensors_said(said: Any) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each tensor of a described value, in order."""
    kind, what, *more = said
    if kind == "tensor":
        yield getattr(torch, what), tuple(more[0])
    elif kind == "dict":
        for _, value in what:
            yield from tensors_said(value)
    elif kind != "plain":
        for item in what:
            yield from tensors_said(item)


def map_tensors(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """A new nest of lists, tuples and dicts around other tensors; all else in it is as it was.

    Args:
        value: The nest.
        change: What is put in the place of each.
        kind: What stands for tensors in it.
    """
    if isinstance(value, kind):
        return change(value)
    if type(value) in {list, tuple}:
        return type(value)(map_tensors(item, change, kind) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change, kind) for key, item in value.items()}
    return value
