"""Layers: who calls are counted for, and what they are called in messages and tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, final
from weakref import WeakKeyDictionary

from attrs import define, field
from torch import nn

# A module's own call; also of a forward that is a function put in the place of its own.
_FORWARD: Final = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "<lambda>")


@define(eq=False)
class Layer:
    """A module, another method of one, or all functions of one name."""

    name: str
    index: int  # in the order of first calls
    num_calls: int = 0  # those within recomputations aside

    def count(self) -> int:
        """How many calls there were before this one."""
        self.num_calls += 1
        return self.num_calls - 1


@final
@define(eq=False)
class Layers:
    """All that were called. Modules of one class are numbered in the order of their first calls."""

    _modules: WeakKeyDictionary[nn.Module, dict[str, Layer]] = field(
        factory=WeakKeyDictionary, init=False
    )
    _names: WeakKeyDictionary[nn.Module, str] = field(factory=WeakKeyDictionary, init=False)
    _functions: dict[str, Layer] = field(factory=dict, init=False)
    _num_of_class: dict[str, int] = field(factory=dict, init=False)
    _count: int = field(default=0, init=False)

    def name(self, module: nn.Module, name: str) -> None:
        """What to call a module, before its first call. Its class and a number otherwise."""
        self._names[module] = name

    def of(self, function: Callable[..., Any]) -> Layer:
        """The layer of a function that is called."""
        module, function = module_of(function), _inside(function)
        if module is None:
            name = getattr(function, "__qualname__", type(function).__qualname__)
            return self._among(self._functions, name, name)
        layers = self._modules.get(module)
        if layers is None:
            layers = self._modules[module] = {}
            self._names.setdefault(module, self._numbered(module))
        method = getattr(function, "__name__", _FORWARD[0])
        key = "" if method in _FORWARD else method
        if key in layers:  # nearly always: names are looked up once
            return layers[key]
        return self._among(layers, key, ".".join(filter(None, (self._names[module], key))))

    def _among(self, layers: dict[str, Layer], key: str, name: str) -> Layer:
        if key not in layers:
            layers[key] = Layer(name, self._count)
            self._count += 1
        return layers[key]

    def _numbered(self, module: nn.Module) -> str:
        kind = type(module).__name__
        number = self._num_of_class[kind] = self._num_of_class.get(kind, 0) + 1
        return kind if number == 1 else f"{kind} {number}"


def module_of(function: Callable[..., Any]) -> nn.Module | None:
    """The module that is called, or whose method is; also through functools.partial.

    Libraries write both partial(block, ...) and partial(Block.forward, block, ...).
    """
    given = function.args[:1] if isinstance(function, partial) else ()
    function = _inside(function)
    for found in (getattr(function, "__self__", function), *given):
        if isinstance(found, nn.Module):
            return found
    return None


def _inside(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function
