"""Layers: who calls are counted for, and what they are called in messages and tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final
from weakref import WeakKeyDictionary

from attrs import define, field
from torch import nn


@define(eq=False)
class Layer:
    """A module, or all functions of one name."""

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

    _modules: WeakKeyDictionary[nn.Module, Layer] = field(factory=WeakKeyDictionary, init=False)
    _names: WeakKeyDictionary[nn.Module, str] = field(factory=WeakKeyDictionary, init=False)
    _functions: dict[str, Layer] = field(factory=dict, init=False)
    _num_of_class: dict[str, int] = field(factory=dict, init=False)
    _count: int = field(default=0, init=False)

    def name(self, module: nn.Module, name: str) -> None:
        """What to call a module, before its first call. Its class and a number otherwise."""
        self._names[module] = name

    def of(self, function: Callable[..., Any]) -> Layer:
        """The layer of a function that is called."""
        module = module_of(function)
        if module is None:
            name = getattr(function, "__qualname__", None) or repr(function)
            if name not in self._functions:
                self._functions[name] = self._new(name)
            return self._functions[name]
        if module not in self._modules:
            self._modules[module] = self._new(self._names.get(module) or self._numbered(module))
        return self._modules[module]

    def _numbered(self, module: nn.Module) -> str:
        kind = type(module).__name__
        number = self._num_of_class[kind] = self._num_of_class.get(kind, 0) + 1
        return f"a {kind}" if number == 1 else f"a {kind} (number {number})"

    def _new(self, name: str) -> Layer:
        self._count += 1
        return Layer(name, self._count - 1)


def module_of(function: Callable[..., Any]) -> nn.Module | None:
    """The module that is called, or whose method is, also through functools.partial."""
    while isinstance(function, partial):
        function = function.func
    module = getattr(function, "__self__", function)
    return module if isinstance(module, nn.Module) else None
