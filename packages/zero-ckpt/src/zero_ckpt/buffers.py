"""Buffers that a module's forward writes to, such as batch norm's statistics: written once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Final, final

import torch
from attrs import define, field
from torch import Tensor, nn

from .frame import AbstractCompanion
from .layers import module_of
from .torch_private import version_of

# Kernels write some buffers behind the version's back (batch norm's statistics), and those are
# small. A larger one is put back only where its version says that forward wrote to it.
_SMALL_BYTES: Final = 1 << 16
_LEAD_ON: Final = (nn.Module, FunctionType, MethodType, partial)


@final
@define(eq=False)
class OnceWritten(AbstractCompanion):
    """Puts buffers back after a recomputation, as forward has left them."""

    _buffers: list[Tensor]
    _written: list[Tensor] = field(factory=list, init=False)

    @classmethod
    def of(cls, function: Any) -> OnceWritten | None:
        """For a module, its method, or what has modules in its closure; None if there is none."""
        module = module_of(function)
        modules = _modules_behind(function) if module is None else [module]
        buffers = list(_buffers_in(modules))
        return cls(buffers) if buffers else None

    @contextmanager
    def _noting(self) -> Iterator[None]:
        versions = [version_of(buffer) for buffer in self._buffers]
        yield
        self._written = [
            buffer
            for buffer, version in zip(self._buffers, versions, strict=True)
            if version_of(buffer) != version or buffer.nbytes <= _SMALL_BYTES
        ]

    def forward(self) -> AbstractContextManager[Any]:
        """See which it writes to."""
        return self._noting()

    @contextmanager
    def _putting_back(self) -> Iterator[None]:
        before = [buffer.detach().clone() for buffer in self._written]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(self._written, before, strict=True):
                    buffer.data.copy_(value)  # through .data: nobody saved what comes between

    def recompute(self) -> AbstractContextManager[Any]:
        """Undo what it writes."""
        return self._putting_back() if self._written else nullcontext()


def _buffers_in(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Those of their parts that are in training; `modules()`, at a third of the time."""
    parts = list(modules)
    found = set(parts)
    for part in parts:
        if part.training:
            yield from (buffer for buffer in part._buffers.values() if buffer is not None)
        for child in part._modules.values():
            if child is not None and child not in found:
                found.add(child)
                parts.append(child)


def _modules_behind(function: Any) -> Iterable[nn.Module]:
    """Those in the closure of a function, also in lists and behind functions there."""
    found: dict[nn.Module, None] = {}
    values, seen = [function], {id(function)}

    def look_at(more: Iterable[Any]) -> None:
        new = [value for value in more if id(value) not in seen]
        seen.update(map(id, new))
        values.extend(new)

    for value in values:
        if isinstance(value, nn.Module):
            found[value] = None
        elif isinstance(value, list | tuple):
            if value and isinstance(value[0], _LEAD_ON):  # a list may be long, and of numbers
                look_at(value)
        elif isinstance(value, partial):
            look_at((value.func, *value.args))
        elif isinstance(value, MethodType):
            look_at((value.__self__, value.__func__))
        elif isinstance(value, FunctionType):
            look_at(cell.cell_contents for cell in value.__closure__ or () if _is_full(cell))
    return found


def _is_full(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # the name has no value yet, or was deleted
        return False
    return True
