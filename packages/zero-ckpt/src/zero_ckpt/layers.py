"""Layers of checkpointed calls: their names, numbers of calls, and buffers that they write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from types import FunctionType, MethodType
from typing import Any, Final, final
from weakref import WeakKeyDictionary

import torch
from attrs import define, field
from torch import Tensor, nn

from .frame import AbstractCompanion
from .torch_private import own_buffers, own_modules, version_of

# Names of methods that are the call of a module itself; the last is that of a function that was put
# in the place of `forward`.
_FORWARD: Final = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "<lambda>")


@define(eq=False)
class Layer:
    """Name and calls of a module, of another method of one, or of all functions of one name."""

    name: str
    # Number of layers whose first call was earlier.
    index: int
    # Counts the calls outside of recomputations; `next` returns the number of earlier ones.
    calls: Iterator[int] = field(factory=count, init=False)


@final
@define(eq=False)
class Layers:
    """Layers called so far. Modules of one class are numbered in the order of their first calls."""

    _modules: WeakKeyDictionary[nn.Module, dict[str, Layer]] = field(
        factory=WeakKeyDictionary, init=False
    )
    # Module -> its name in messages: one given before its first call, or its class and a number.
    names: WeakKeyDictionary[nn.Module, str] = field(factory=WeakKeyDictionary, init=False)
    _functions: dict[str, Layer] = field(factory=dict, init=False)
    _num_of_class: Counter[str] = field(factory=Counter, init=False)
    _indexes: Iterator[int] = field(factory=count, init=False)

    def of(self, function: Callable[..., Any]) -> Layer:
        """Return the layer of a function that is called; created at its first call."""
        module, function = module_of(function), _inside(function)
        if module is None:
            name = getattr(function, "__qualname__", type(function).__qualname__)
            return self._among(self._functions, name, name)
        layers = self._modules.get(module)
        if layers is None:
            layers = self._modules[module] = {}
            kind = type(module).__name__
            self._num_of_class[kind] += 1
            number = self._num_of_class[kind]
            self.names.setdefault(module, kind if number == 1 else f"{kind} {number}")
        method = getattr(function, "__name__", _FORWARD[0])
        key = "" if method in _FORWARD else method
        if key in layers:
            return layers[key]
        return self._among(layers, key, ".".join(filter(None, (self.names[module], key))))

    def _among(self, layers: dict[str, Layer], key: str, name: str) -> Layer:
        if key not in layers:
            layers[key] = Layer(name, next(self._indexes))
        return layers[key]


def module_of(function: Callable[..., Any]) -> nn.Module | None:
    """Return the module that is called, or whose method is, also inside functools.partial; or None.

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


# Kernels write some buffers without a new version (batch norm's statistics), and those are small. A
# larger one is restored only where its version says that forward wrote to it.
_SMALL_BYTES: Final = 1 << 16
# Types of values that are a module or may refer to one.
_LEAD_ON: Final = (nn.Module, FunctionType, MethodType, partial)


@final
@define(eq=False)
class OnceWritten(AbstractCompanion):
    """Buffers that forward wrote; writes of a recomputation to them are undone after it."""

    _buffers: list[Tensor]
    _written: list[Tensor] = field(factory=list, init=False)

    @classmethod
    def of(cls, function: Any, arguments: Iterable[Any] = ()) -> OnceWritten | None:
        """Return the buffers of a module, its method or a function's modules; None if none.

        A function's modules are those in its closure, its defaults and its arguments.
        """
        module = module_of(function)
        modules = _modules_behind((function, *arguments)) if module is None else [module]
        buffers = list(_buffers_in(modules))
        return cls(buffers) if buffers else None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record the buffers that the first run writes to; small ones count as written."""
        versions = [version_of(buffer) for buffer in self._buffers]
        yield
        self._written = [
            buffer
            for buffer, version in zip(self._buffers, versions, strict=True)
            if version_of(buffer) != version or buffer.nbytes <= _SMALL_BYTES
        ]

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Restore the recorded buffers after a later run."""
        before = [buffer.detach().clone() for buffer in self._written]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(self._written, before, strict=True):
                    # `.data` does not raise the buffer's version: a tensor that autograd saved must
                    # not count as written in place because its old value was restored.
                    buffer.data.copy_(value)


def _buffers_in(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield the buffers of submodules in training mode, the modules themselves included.

    It walks the tree in a third of the time of `modules()`.
    """
    parts = list(modules)
    found = set(parts)
    for part in parts:
        if part.training:
            yield from (buffer for buffer in own_buffers(part).values() if buffer is not None)
        for child in own_modules(part).values():
            if child is not None and child not in found:
                found.add(child)
                parts.append(child)


def _modules_behind(given: Iterable[Any]) -> Iterable[nn.Module]:
    """Return modules among values, in closures and defaults of functions, and in lists of these."""
    found: dict[nn.Module, None] = {}
    values: list[Any] = []
    seen: set[int] = set()

    def look_at(more: Iterable[Any]) -> None:
        new = [value for value in more if id(value) not in seen]
        seen.update(map(id, new))
        values.extend(new)

    look_at(given)
    for value in values:
        if isinstance(value, nn.Module):
            found[value] = None
        elif isinstance(value, list | tuple):
            # The first item decides, since a list may have very many numbers.
            if value and isinstance(value[0], _LEAD_ON):
                look_at(value)
        elif isinstance(value, partial):
            look_at((value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, MethodType):
            look_at((value.__self__, value.__func__))
        elif isinstance(value, FunctionType):
            look_at(value.__defaults__ or ())
            look_at((value.__kwdefaults__ or {}).values())
            for cell in value.__closure__ or ():
                # A cell is empty if its variable has no value yet, or was deleted.
                with suppress(ValueError):
                    look_at([cell.cell_contents])
    return found
