"""Calls, with the tensors of their arguments separated from everything else."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from operator import is_, setitem
from types import FunctionType, MethodType
from typing import Any, Final, NamedTuple

from attrs import frozen
from torch import Tensor, nn

from .errors import CheckpointError
from .torch_private import version_of

_SEQUENCES: Final = (tuple, list)
# A dict is a MutableMapping too, but isinstance finds that out more slowly.
_MAPPINGS: Final = (dict, MutableMapping)
_GROWING: Final = (dict, set, deque)
# Types of values that contain no other values.
_PLAIN: Final = (type(None), bool, int, float, str)


def replace_in(
    value: Any, kind: type, replace: Callable[[Any], Any], *, copies: bool = False
) -> Any:
    """Return the same value with `replace(x)` in place of each `x` of a kind, depth first.

    Looks into dicts, lists, tuples (named ones too), subclasses of these, and dataclasses. A
    container of something to replace is copied; with `copies`, so is every dict, list, set and
    deque. Everything else is the same object.
    """
    if isinstance(value, kind):
        return replace(value)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, _SEQUENCES):
        new = [replace_in(item, kind, replace, copies=copies) for item in value]
        is_same = all(map(is_, new, value)) and not (copies and isinstance(value, list))
        return value if is_same else _like(value, new)
    other = copy(value) if copies and isinstance(value, _GROWING) else value
    put: Callable[[Any, Any, Any], None] = setitem
    if isinstance(value, _MAPPINGS):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        put = object.__setattr__
    else:
        return other
    for key, item in [*items.items()]:
        changed = replace_in(item, kind, replace, copies=copies)
        if changed is not item:
            other = copy(value) if other is value else other
            put(other, key, changed)
    return other


def _like(value: Any, items: list[Any]) -> Any:
    if isinstance(value, list):
        other = copy(value)
        other[:] = items
        return other
    if hasattr(value, "_fields"):  # a named tuple
        return type(value)(*items)
    return tuple.__new__(type(value), items)


_NO_DISPATCH: Final = Tensor.__torch_dispatch__


class _Place(int):
    """Index that replaces an input among the arguments."""


_LEAVES: Final = (*_PLAIN, _Place, FunctionType, MethodType, type)


class _Input(NamedTuple):
    """Properties of an input tensor that savers do not keep."""

    requires_grad: bool
    version: int
    # The class, where it is a subclass without a dispatch of its own; else None.
    kind: type[Tensor] | None
    attributes: dict[str, Any]

    @classmethod
    def of(cls, tensor: Tensor) -> _Input:
        kind, attributes = type(tensor), {}
        if kind is Tensor or kind.__torch_dispatch__ is not _NO_DISPATCH:
            # A subclass with a dispatch of its own (DTensor) stays what it is through `detach`.
            kind = None
        else:
            attributes = dict(vars(tensor))
        return cls(tensor.requires_grad, version_of(tensor), kind, attributes)

    def again(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if self.kind is not None:
            tensor = tensor.as_subclass(self.kind)
            vars(tensor).update(self.attributes)
        return tensor.requires_grad_(self.requires_grad)


@frozen(eq=False)
class Call:
    """A function and its arguments, with numbers in place of tensors.

    Parameters are kept by reference: they exist anyway, and where ZeRO shards them, the function
    gathers them for as long as it uses them.

    Lists, dicts, sets and deques are copies of those given, and are copied for each recomputation,
    so that what the function puts into them then does not reach those of the caller.
    """

    function: Callable[..., Any]
    _arguments: tuple[tuple[Any, ...], Mapping[str, Any]]
    _inputs: list[_Input]
    # Parameter among the arguments -> its version before the first call.
    params: dict[nn.Parameter, int]
    # The result of `_sizes_in` before the first call.
    _sizes: dict[str, int]

    @classmethod
    def of(cls, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Call, list[Tensor]]:
        """Return the call and its inputs: each tensor once, in the order of arguments. Local."""
        places: dict[int, _Place] = {}
        inputs: list[Tensor] = []
        params: dict[nn.Parameter, int] = {}

        def place_of(tensor: Tensor) -> _Place | nn.Parameter:
            if isinstance(tensor, nn.Parameter):
                params[tensor] = version_of(tensor)
                return tensor
            if id(tensor) not in places:
                places[id(tensor)] = _Place(len(inputs))
                inputs.append(tensor)
            return places[id(tensor)]

        arguments = replace_in((args, kwargs), Tensor, place_of, copies=True)
        known = [_Input.of(tensor) for tensor in inputs]
        return cls(function, arguments, known, params, _sizes_in(arguments)), inputs

    def again(self, inputs: Sequence[Tensor]) -> Any:
        """Call the function with these inputs, after detaching them."""
        fresh = [known.again(tensor) for known, tensor in zip(self._inputs, inputs, strict=True)]
        args, kwargs = replace_in(self._arguments, _Place, lambda place: fresh[place], copies=True)
        return self.function(*args, **kwargs)

    def check_params(self, layer: str, when: str) -> None:
        """Raise CheckpointError if a parameter among the arguments was written in place since."""
        for param, version in self.params.items():
            if version_of(param) != version:
                raise CheckpointError(
                    f"{layer}: a parameter that it was given, of shape {tuple(param.shape)}, was "
                    f"written in place {when}, so it cannot be computed again; write to a clone, "
                    "or after backward"
                )

    def check_unwritten(self, inputs: Sequence[Tensor], layer: str) -> None:
        """Raise CheckpointError if the function wrote to an input: it could not run again.

        Raise it too if the function changed the number of tensors in a list of an object that it
        was given: such lists are not copied.
        """
        self.check_params(layer, "by itself")
        for where, size in _sizes_in(self._arguments).items():
            if size != self._sizes.get(where, size):
                raise CheckpointError(
                    f"{layer}: it changed the number of tensors in {where} from "
                    f"{self._sizes[where]} to {size}, and would do so again when it is computed "
                    "once more; let it return what it collects, or take a list as an argument"
                )
        for index, (known, tensor) in enumerate(zip(self._inputs, inputs, strict=True)):
            if version_of(tensor) != known.version:
                raise CheckpointError(
                    f"{layer}: it wrote in place to its input {index}, of shape "
                    f"{tuple(tensor.shape)}, so it could not be computed again from the values it "
                    "was given; let it write to a clone"
                )


def _sizes_in(arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> dict[str, int]:
    """Return how many tensors are in lists that are attributes of arguments other than modules.

    Other contents are often a log or a cache, which may grow twice.
    """
    args, kwargs = arguments
    return {
        f"attribute {name!r} of argument {key!r}": sum(isinstance(v, Tensor) for v in value)
        for key, argument in (*enumerate(args), *kwargs.items())
        if type(argument) not in _LEAVES and not isinstance(argument, nn.Module)
        for name, value in getattr(argument, "__dict__", {}).items()
        if isinstance(value, list | deque)
    }
