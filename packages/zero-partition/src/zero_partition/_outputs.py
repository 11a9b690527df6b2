"""Every tensor in what a module returned, whatever it is wrapped in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ._errors import StateError

# Objects of classes that say nothing about their content are looked into, but not without end: one
# of them may lead to a whole program.
_MAX_NESTED_OBJECTS: Final = 3
_ATOMS: Final = (str, bytes, int, float, complex, bool, type(None))
_OPAQUE: Final = (nn.Module, type, FunctionType, MethodType, ModuleType)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in tuples, mappings, sets, dataclasses, attrs classes, pytree nodes and objects.

    Each container is looked into once. A module is opaque: its parameters are no output.
    """
    if isinstance(value, Tensor):  # the usual case, without a set
        yield value
    else:
        yield from _tensors_in(value, set(), _MAX_NESTED_OBJECTS)


def converted(value: Any, dtype: torch.dtype) -> Any:
    """The same with every floating-point tensor that torch's pytrees find in another dtype.

    The very same object, not a copy of its containers, where all of them are of it.
    """

    def is_other(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype

    leaves, spec = _pytree.tree_flatten(value)
    if not any(map(is_other, leaves)):
        return value
    return _pytree.tree_unflatten([t.to(dtype) if is_other(t) else t for t in leaves], spec)


def converted_output(value: Any, dtype: torch.dtype) -> Any:
    """As `converted`, of what the model returned.

    Raises:
        StateError: A tensor lies in something that torch's pytrees do not know.
    """
    result = converted(value, dtype)
    if any(tensor.is_floating_point() and tensor.dtype != dtype for tensor in tensors_in(result)):
        raise StateError(
            f"Precision.outputs={dtype}: the model returned a {type(value).__name__} with tensors "
            "that cannot be replaced in it; return tensors in tuples, lists, dicts or what is "
            "registered by torch.utils._pytree.register_pytree_node, or convert them in the model"
        )
    return result


def _tensors_in(value: Any, seen: set[int], num_objects: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, _ATOMS) or id(value) in seen:
        return
    seen.add(id(value))
    content = _content_of(value)
    if content is None:
        if not num_objects or isinstance(value, _OPAQUE):
            return
        num_objects -= 1
        content = _attributes_of(value)
    for item in content:
        yield from _tensors_in(item, seen, num_objects)


def _content_of(value: Any) -> Iterable[Any] | None:
    """What its class says is in it, None if its class says nothing."""
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, Mapping):
        return list(value.values())
    if type(value) in _pytree.SUPPORTED_NODES:
        return _pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0]
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    if attrs.has(type(value)):
        return [getattr(value, field.name, None) for field in attrs.fields(type(value))]
    return None


def _attributes_of(value: Any) -> Iterator[Any]:
    yield from list(getattr(value, "__dict__", {}).values())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = cls.__dict__.get(name)
            if hasattr(descriptor, "__get__"):
                try:
                    yield descriptor.__get__(value, cls)
                except AttributeError:
                    continue  # a slot that was never assigned
