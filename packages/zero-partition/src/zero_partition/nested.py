"""Optimizer state of any nesting as tensors and words about them, and never as pickled objects."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import attrs
import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from .errors import StateError
from .torch_private import pytree


def is_wrapper(value: Any) -> bool:
    """Return whether it is a tensor that is made of others, such as a quantized one."""
    return isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__")


@frozen
class Wrapped:
    """A tensor that is made of others: what `__tensor_flatten__` says of it."""

    module: str
    name: str
    inner: dict[str, Any]  # attribute -> tensor, or what stands for one
    context: Any
    shape: tuple[int, ...]

    @classmethod
    def of(cls, value: Any) -> Wrapped:
        """Take a tensor apart."""
        names, context = value.__tensor_flatten__()
        inner = {name: getattr(value, name) for name in names}
        kind = type(value)
        return cls(kind.__module__, kind.__qualname__, inner, context, tuple(value.shape))

    def describe(self, tensors: list[Tensor]) -> Any:
        """What JSON can say of it, as `describe`."""
        parts = (self.inner, self.context, self.shape)
        return ["wrapper", [self.module, self.name], *(describe(part, tensors) for part in parts)]

    def built(self) -> Any:
        """Return the tensor, or itself where something stands for one of the tensors inside.

        Raises:
            StateError: Its class is none that the process has already.
        """
        if not all(isinstance(each, Tensor) for each in self.inner.values()):
            return self
        kind = getattr(sys.modules.get(self.module), self.name, None)
        is_known = isinstance(kind, type) and issubclass(kind, Tensor)
        if not is_known or not hasattr(kind, "__tensor_unflatten__"):
            raise StateError(
                f"state is made of {self.module}.{self.name}, which is no class of tensors here; "
                "import the optimizer's package first"
            )
        shape = torch.Size(self.shape)
        strides = torch.empty(shape, device="meta").stride()
        return kind.__tensor_unflatten__(self.inner, self.context, shape, strides)  # type: ignore[union-attr]


def describe(value: Any, tensors: list[Tensor]) -> Any:
    """What JSON can say of a value. Its tensors are appended to the list, in order.

    Raises:
        StateError: It holds something that is no tensor, number, string, None, list, tuple or dict.
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise StateError(f"expected dense tensors, got layout {value.layout}")
        if is_wrapper(value):
            return Wrapped.of(value).describe(tensors)
        tensors.append(value)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if value is None or type(value) in {bool, int, float, str}:
        return ["plain", value]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    kinds: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "tuple", set: "set"}
    if type(value) in kinds:
        items = sorted(value, key=repr) if isinstance(value, set) else value
        return [kinds[type(value)], [describe(item, tensors) for item in items]]
    if isinstance(value, dict):
        return ["dict", [[describe(k, []), describe(v, tensors)] for k, v in value.items()]]
    raise StateError(
        f"expected tensors, numbers, strings, None, and lists, tuples and dicts of these, got a "
        f"{type(value).__name__}, which would have to be pickled to travel"
    )


def rebuild(description: Any, tensors: Iterator[Any]) -> Any:
    """The value that was described, of these tensors, or of what stands for them."""
    kind, what, *more = description
    if kind == "tensor":
        return next(tensors)
    if kind == "plain":
        return what
    if kind == "dtype":
        return getattr(torch, what)
    if kind == "wrapper":
        return Wrapped(*what, *(rebuild(item, tensors) for item in more))
    if kind == "dict":
        return {rebuild(k, tensors): rebuild(v, tensors) for k, v in what}
    items = [rebuild(item, tensors) for item in what]
    return {"list": list, "tuple": tuple, "set": set}[kind](items)


def described_tensors(description: Any) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each tensor of a described value, in order."""
    kind, what, *more = description
    if kind == "tensor":
        yield getattr(torch, what), tuple(more[0])
    elif kind == "dict":
        for _, value in what:
            yield from described_tensors(value)
    elif kind == "wrapper":
        for item in more:
            yield from described_tensors(item)
    elif kind not in {"plain", "dtype"}:
        for item in what:
            yield from described_tensors(item)


def map_tensors(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """A new nest of lists, tuples and dicts around other tensors; all else in it is as it was.

    Args:
        value: The nest.
        change: What is put in the place of each.
        kind: What stands for tensors in it.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Wrapped):
        return evolve(value, inner=map_tensors(value.inner, change, kind)).built()
    if type(value) in {list, tuple}:
        return type(value)(map_tensors(item, change, kind) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change, kind) for key, item in value.items()}
    return value


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

    leaves, spec = pytree.tree_flatten(value)
    if not any(map(is_other, leaves)):
        return value
    return pytree.tree_unflatten([t.to(dtype) if is_other(t) else t for t in leaves], spec)


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
    kind = type(value)
    if isinstance(value, list | tuple | set | frozenset):
        content: Iterable[Any] = value
    elif isinstance(value, Mapping):
        content = list(value.values())
    elif kind in pytree.SUPPORTED_NODES:
        content = pytree.SUPPORTED_NODES[kind].flatten_fn(value)[0]
    else:
        if not is_dataclass(kind) and not attrs.has(kind):
            if not num_objects or isinstance(value, _OPAQUE):
                return
            num_objects -= 1
        content = _attributes_of(value)
    for item in content:
        yield from _tensors_in(item, seen, num_objects)


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
