"""Nested optimizer state as tensors and a JSON description, never as pickled objects."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import attrs
import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from .errors import StateError
from .torch_private import pytree


def is_wrapper(value: Any) -> bool:
    """Return whether a value is a tensor that is made of other tensors, such as a quantized one."""
    return isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__")


_NOT_OURS_TO_MAKE: Final = frozenset(
    {"builtins", "collections", "functools", "itertools", "numpy", "random", "torch", "weakref"}
)


def is_made_of_attributes(value: Any) -> bool:
    """Return whether an object is its attributes alone, so that another can be made of them."""
    return hasattr(value, "__dict__") and _has_attributes_alone(type(value))


def _has_attributes_alone(kind: type) -> bool:
    """Return whether objects of a class are attributes alone, and have no finalizer."""
    plain = ("__reduce__", "__reduce_ex__", "__getstate__", "__new__")
    return (
        not issubclass(kind, (Tensor, *_OPAQUE))
        and kind.__module__.partition(".")[0] not in _NOT_OURS_TO_MAKE
        and not kind.__module__.startswith("zero_")
        and not hasattr(kind, "__del__")
        and not any("__slots__" in vars(each) for each in kind.__mro__[:-1])
        and all(getattr(kind, name) is getattr(object, name) for name in plain)
    )


@frozen
class Parts:
    """Parts of a tensor that is made of other tensors, or of an object that is its attributes."""

    module: str
    name: str
    # Attribute -> value, or a placeholder for it.
    inner: dict[str, Any]
    # What `__tensor_flatten__` gives beside the attributes.
    context: Any = None
    # Shape of a tensor; None for an object.
    shape: tuple[int, ...] | None = None

    @classmethod
    def of(cls, value: Any) -> Parts:
        """Take a tensor or an object apart."""
        kind = type(value)
        names = (kind.__module__, kind.__qualname__)
        if not isinstance(value, Tensor):
            return cls(*names, dict(vars(value)))
        attributes, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: getattr(value, name) for name in attributes}
        return cls(*names, inner, context, tuple(value.shape))

    def describe(self, tensors: list[Tensor]) -> Any:
        """Return a description for JSON, and append the tensors to the list, as `describe` does."""
        parts = (self.inner, self.context, self.shape)
        return ["wrapper", [self.module, self.name], *(describe(part, tensors) for part in parts)]

    def built(self) -> Any:
        """Return the tensor or object made of the parts; itself while a placeholder is among them.

        Raises:
            StateError: The process has no such class, or it cannot be made of parts.
        """
        if not all(map(_is_there, self.inner.values())):
            return self
        kind = getattr(sys.modules.get(self.module), self.name, None)
        kind = kind if isinstance(kind, type) else object
        if self.shape is None and _has_attributes_alone(kind):
            made: Any = object.__new__(kind)
            vars(made).update(self.inner)
            return made
        is_wrapper_class = issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")
        if self.shape is None or not is_wrapper_class:
            raise StateError(
                f"state is made of {self.module}.{self.name}, which is no class here that can be "
                "made of its parts; import the optimizer's package first"
            )
        shape = torch.Size(self.shape)
        strides = torch.empty(shape, device="meta").stride()
        return kind.__tensor_unflatten__(self.inner, self.context, shape, strides)  # type: ignore[attr-defined]


def _is_there(value: Any) -> bool:
    """Return whether a value of `Parts` has no placeholder in the place of a tensor."""
    if type(value) in {list, tuple}:
        return all(map(_is_there, value))
    if isinstance(value, dict):
        return all(map(_is_there, value.values()))
    kinds = (Tensor, torch.dtype, torch.Size, Enum, set, *_ATOMS)
    return isinstance(value, kinds) or is_made_of_attributes(value)


def foreign_classes(value: Any, packages: Collection[str]) -> list[str]:
    """Return the classes outside these packages of which `Parts.built` would make objects.

    A file may name any class that the process has, and some classes delete files when objects end.
    """
    if isinstance(value, Parts):
        is_own = value.shape is not None or value.module.partition(".")[0] in packages
        own = [] if is_own else [f"{value.module}.{value.name}"]
        return [*own, *foreign_classes(value.inner, packages)]
    if isinstance(value, dict):
        value = list(value.values())
    inside = value if type(value) in {list, tuple} else ()
    return [name for item in inside for name in foreign_classes(item, packages)]


# NOTE(entries' names): the name of an entry of state is its key. If a value is a dict, each of its
# items is an entry, so that its tensors are cut and saved as others are; its name is the JSON list
# of the keys that lead to it. Keys that are no strings are written as such a list, too.


def flat_entries(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the entries of a state by name, in nested dicts too; see NOTE(entries' names)."""
    found: dict[str, Any] = {}
    waiting = [((key,), value) for key, value in reversed([*state.items()])]
    while waiting:
        path, value = waiting.pop()
        is_dict = type(value) in {dict, defaultdict, OrderedDict} and value
        if is_dict and all(type(key) in {int, str} for key in value):
            waiting += [((*path, key), item) for key, item in reversed([*value.items()])]
        else:
            found[_name_of_entry(path)] = value
    return found


def _name_of_entry(path: tuple[Any, ...]) -> str:
    if len(path) == 1 and type(path[0]) is str and not path[0].startswith("["):
        return path[0]
    return json.dumps(path) if all(type(key) in {int, str} for key in path) else f"[?{path[0]!r}"


def is_strange(name: str) -> bool:
    """Return whether an entry's key has no name in a file or a message."""
    return name.startswith("[?")


def nested_entries(entries: Mapping[str, Any]) -> dict[Any, Any]:
    """Undo `flat_entries`."""
    state: dict[Any, Any] = {}
    for name, value in entries.items():
        set_entry(state, name, value)
    return state


def set_entry(state: dict[Any, Any], name: str, value: Any) -> None:
    """Set an entry of a state, in the nested dict to which its name leads."""
    *outer, key = keys_of_entry(name)
    for each in outer:
        state = state.setdefault(each, {})
    state[key] = value


def keys_of_entry(name: str) -> list[Any]:
    """Return the keys that lead to an entry."""
    return json.loads(name) if name.startswith("[") else [name]


def describe(value: Any, tensors: list[Tensor]) -> Any:
    """Describe a value for JSON, and append its tensors to the list, in order.

    Raises:
        StateError: The value contains something that is no tensor, number, string, None, list,
            tuple or dict, and no object that is its attributes alone.
    """
    kinds: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "size", set: "set"}
    said: Any
    if is_wrapper(value) or is_made_of_attributes(value):
        said = Parts.of(value).describe(tensors)
    elif isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise StateError(f"expected dense tensors, got layout {value.layout}")
        tensors.append(value)
        said = ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    elif value is None or type(value) in {bool, int, float, str}:
        said = ["plain", value]
    elif isinstance(value, torch.dtype):
        said = ["dtype", str(value).removeprefix("torch.")]
    elif isinstance(value, Enum):
        said = ["enum", [type(value).__module__, type(value).__qualname__, value.name]]
    elif type(value) in kinds:
        items = sorted(value, key=repr) if isinstance(value, set) else value
        said = [kinds[type(value)], [describe(item, tensors) for item in items]]
    elif isinstance(value, dict):
        said = ["dict", [[_describe_key(k), describe(v, tensors)] for k, v in value.items()]]
    else:
        raise StateError(
            "expected tensors, numbers, strings, None, and lists, tuples and dicts of these, got a "
            f"{type(value).__name__}, which would have to be pickled to travel"
        )
    return said


def _describe_key(key: Any) -> Any:
    said = describe(key, inside := [])
    if inside or said[0] == "wrapper":
        raise StateError(
            f"expected keys that are numbers, strings or tuples of these, got a "
            f"{type(key).__name__}, which would have to be pickled to travel"
        )
    return said


def rebuild(description: Any, tensors: Iterator[Any]) -> Any:
    """Return the value that was described, made of these tensors or of placeholders for them.

    Raises:
        StateError: The description, which may come from a file, is invalid, or has more tensors.
    """
    try:
        return _rebuilt(description, tensors)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise StateError(f"its description makes no sense ({error!r})") from error


def _rebuilt(description: Any, tensors: Iterator[Any]) -> Any:
    kind, what, *more = description
    # A plain value is described by itself.
    value: Any = what
    if kind == "tensor":
        value = next(tensors, None)
        if value is None:
            raise LookupError("there are fewer tensors")
    elif kind == "dtype":
        value = getattr(torch, what)
        if not isinstance(value, torch.dtype):
            raise TypeError(f"{what!r} is no dtype")
    elif kind == "enum":
        value = _member_of(*what)
    elif kind == "wrapper":
        value = Parts(*what, *(_rebuilt(item, tensors) for item in more))
    elif kind == "dict":
        value = {_rebuilt(k, tensors): _rebuilt(v, tensors) for k, v in what}
    elif kind != "plain":
        items = [_rebuilt(item, tensors) for item in what]
        value = {"list": list, "tuple": tuple, "size": torch.Size, "set": set}[kind](items)
    return value


def _member_of(module: str, name: str, member: str) -> Enum:
    kind = getattr(sys.modules.get(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, Enum) and member in kind.__members__):
        raise StateError(
            f"state has {module}.{name}.{member}, which is in no enumeration here; import the "
            "optimizer's package first"
        )
    return kind[member]


def is_plain(description: Any) -> bool:
    """Return whether a described value has no tensors, objects or members of enumerations."""
    kind, what, *_ = description
    if kind == "dict":
        return all(is_plain(key) and is_plain(item) for key, item in what)
    return kind in {"plain", "dtype"} or (
        kind in {"list", "tuple", "size", "set"} and all(map(is_plain, what))
    )


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
    elif kind not in {"plain", "dtype", "enum"}:
        for item in what:
            yield from described_tensors(item)


def map_tensors(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Return a copy of nested lists, tuples and dicts with other tensors; all else stays as it is.

    Args:
        value: The nested value.
        change: Called with each tensor; its result takes the tensor's place.
        kind: The class of what is replaced, where that is not tensors.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Parts):
        return evolve(value, inner=map_tensors(value.inner, change, kind)).built()
    if type(value) in {list, tuple}:
        return type(value)(map_tensors(item, change, kind) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change, kind) for key, item in value.items()}
    if is_made_of_attributes(value) and any(True for _ in tensors_in(value)):
        return map_tensors(Parts.of(value), change, kind)
    return value


# Objects of classes that say nothing about their content are searched to this depth, since one of
# them may lead to a whole program.
_MAX_NESTED_OBJECTS: Final = 3
_ATOMS: Final = (str, bytes, int, float, complex, bool, type(None))
_OPAQUE: Final = (nn.Module, type, FunctionType, MethodType, ModuleType)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in tuples, mappings, sets, dataclasses, attrs classes, pytree nodes and objects.

    Each container is looked into once. A module is opaque: its parameters are no output.
    """
    # A tensor is the usual case, and needs no set.
    if isinstance(value, Tensor):
        yield value
    else:
        yield from _tensors_in(value, set(), _MAX_NESTED_OBJECTS)


def plain_tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield tensors as `tensors_in` does, and for a tensor that is made of others those inside."""
    for tensor in tensors_in(value):
        if is_wrapper(tensor):
            yield from plain_tensors_in(list(Parts.of(tensor).inner.values()))
        else:
            yield tensor


def converted(value: Any, dtype: torch.dtype) -> Any:
    """Convert every floating-point tensor that torch's pytrees find in a value to another dtype.

    Where all of them have that dtype, the very same object is returned, not a copy of its
    containers.
    """

    def is_other(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype

    leaves, spec = pytree.tree_flatten(value)
    if not any(map(is_other, leaves)):
        return value
    return pytree.tree_unflatten([t.to(dtype) if is_other(t) else t for t in leaves], spec)


def converted_output(value: Any, dtype: torch.dtype) -> Any:
    """Convert the output of the model, as `converted` does.

    Raises:
        StateError: A tensor is inside an object that torch's pytrees do not know.
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
                    # The slot was never assigned.
                    continue
