"""Gradients that are moved from the device to the host during backward."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

import torch
from attrs import define, field, frozen
from torch import Tensor

from zero_offload.errors import DepartedGradientError, UnsupportedTensorError
from zero_offload.memory.arena import HostArena
from zero_offload.memory.copies import copy_beside
from zero_offload.torch_private import as_subclass_sharing_memory, plain_call

from .subgroups import align_up

# Most gradients that pass through staging buffers, to be added or converted, at a time.
_STAGED: Final = 2


@final
class OffloadedGradient(Tensor):
    """A guard: it has the gradient's shape, dtype and device, and no values.

    With it, torch's `clip_grad_norm_(model.parameters())` raises an error; without it, the call
    would find no gradients and do nothing. Setting `param.grad = None` drops the gradient on the
    host.
    """

    @classmethod
    def of(cls, param: Tensor) -> OffloadedGradient:
        """Return a guard for a parameter's gradient; it has the memory of one element."""
        element = torch.zeros((), dtype=param.dtype, device=param.device)
        return as_subclass_sharing_memory(cls, element.expand(param.shape))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about form; refuse everything that would read or write values."""
        is_attribute = getattr(func, "__name__", "") == "__get__"
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if (is_attribute and attribute not in _VALUES) or func in _FORM:
            return plain_call(func, args, kwargs or {})
        raise DepartedGradientError(
            f"{getattr(func, '__name__', func)} was called on a gradient that has left its device "
            f"for the host, where OffloadedOptimizer steps. To clip, call the optimizer's own "
            f"clip_grad_norm_(max_norm); to drop it, zero_grad(). GradScaler, and what else reads "
            f"gradients, needs OffloadedOptimizer(..., grads='device')"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"OffloadedGradient(shape={tuple(self.shape)}: the gradient is on the host)"


# Attributes that return the elements or a view of them.
_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
_FORM = {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.stride,
    Tensor.element_size,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__hash__,
}


@frozen(eq=False)
class _Delivery:
    """A copy of a gradient in progress."""

    event: Any
    # Kept, so that its memory is not used again before the copy is done.
    source: Tensor
    copy: Tensor
    # Destination on the host: `copy` itself, unless that is added or converted once it is there.
    into: Tensor
    adds: bool
    # Buffer that `copy` is in until it is added or converted; None if it is `into` itself.
    staging: Tensor | None


@final
@define(eq=False)
class HostGradients:
    """Host memory for gradients, page-locked if possible, and copies of gradients into it.

    Args:
        arena: Allocates the memory.
    """

    arena: HostArena
    _under_way: deque[_Delivery] = field(factory=deque, init=False)
    # Staging buffers that are free.
    _staging: list[Tensor] = field(factory=list, init=False)
    _streams: dict[torch.device, Any] = field(factory=dict, init=False)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a gradient: 1-D, zero, on the host; released with its last view.

        Raises:
            BudgetError: The host does not have it.
        """
        return self.arena.allocate(numel, dtype=dtype, name="gradients")

    def deliver(self, received: Tensor, into: Tensor, *, adds: bool) -> None:
        """Begin to copy a gradient to the host, or to add it to the values there.

        Args:
            received: The gradient; must not be changed before `flush` returns.
            into: Memory from `allocate`, of the gradient's shape.
            adds: Add to the values of `into`, instead of replacing them.
        """
        if received.is_cpu:
            into.add_(received) if adds else into.copy_(received)
            return
        copy, staging = into, None
        # torch blocks the host in a copy that converts, so the conversion is made afterwards.
        if adds or received.dtype is not into.dtype:
            staging = self._take_staging(received.nbytes)
            copy = staging[: received.nbytes].view(received.dtype).view(received.shape)
        event = copy_beside(received, copy, self._streams)
        self._under_way.append(_Delivery(event, received, copy, into, adds, staging))

    def flush(self) -> None:
        """Block until all delivered gradients are on the host, and added."""
        while self._under_way:
            self._land()

    def _take_staging(self, num_bytes: int) -> Tensor:
        """Return a staging buffer that is free; blocks while `_STAGED` are in use.

        Small buffers are replaced, so that all become as large as the largest gradient.
        """
        while sum(each.staging is not None for each in self._under_way) >= _STAGED:
            self._land()
        memory = self._staging.pop() if self._staging else None
        if memory is None or memory.nbytes < num_bytes:
            memory = self.arena.allocate(num_bytes, name="gradients on their way")
        return memory

    def _land(self) -> None:
        delivery = self._under_way.popleft()
        delivery.event.synchronize()
        if delivery.staging is not None:
            into, copy = delivery.into, delivery.copy
            into.add_(copy) if delivery.adds else into.copy_(copy)
            self._staging.append(delivery.staging)


@final
@define(eq=False)
class GradientStream:
    """Hooks that copy each gradient to the host once backward has made it, and free its original.

    A guard takes its place in `param.grad`, and marks that there is a gradient: setting
    `param.grad` to None drops it. Gradients of further backwards are added on the host, in the
    gradient's dtype and in the order of the backwards, as autograd does.

    Args:
        arena: Allocates the memory of gradients on the host.
    """

    arena: HostArena
    # Parameter -> memory on the host for its gradient.
    _grads: dict[Tensor, Tensor] = field(factory=dict, init=False)
    # Parameters whose gradient, which autograd now accumulates, is added to the one on the host.
    _adding: set[Tensor] = field(factory=set, init=False)
    _deliveries: HostGradients = field(init=False)
    _hooks: list[Any] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self._deliveries = HostGradients(self.arena)

    def add(self, leaving: Sequence[Tensor]) -> None:
        """Allocate memory for gradients of parameters, and install hooks that copy them to it.

        Raises:
            BudgetError: The host does not have the memory.
        """
        memory = self.arena.allocate(bytes_of(leaving), name="gradients")
        start = 0
        for param in leaving:
            stop = start + param.numel() * param.element_size()
            self._grads[param] = memory[start:stop].view(param.dtype).view(param.shape)
            self._hooks.append(param.register_hook(partial(self._remove_guard, weakref.ref(param))))
            self._hooks.append(param.register_post_accumulate_grad_hook(self._take))
            start = align_up(stop)

    def collect(self, groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, Tensor]:
        """Return gradients by parameter: on the host, or else `param.grad`.

        Blocks until all copies are done. Parameters without a gradient are left out.

        Raises:
            UnsupportedTensorError: A gradient is sparse.
        """
        self._deliveries.flush()
        grads = {}
        for group in groups:
            for param in group["params"]:
                grad = param.grad
                if isinstance(grad, OffloadedGradient):
                    grads[param] = self._grads[param]
                elif grad is not None:
                    if grad.layout is not torch.strided:
                        raise _not_dense(param, grad)
                    grads[param] = grad
        return grads

    def clear(self) -> None:
        """Drop the gradients on the host, once all copies are done."""
        self._deliveries.flush()
        for param in self._grads:
            if isinstance(param.grad, OffloadedGradient):
                param.grad = None

    def close(self) -> None:
        """Remove the hooks and release the memory."""
        self.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._grads, self._deliveries = [], {}, HostGradients(self.arena)

    def _remove_guard(self, reference: weakref.ref[Tensor], grad: Tensor) -> None:
        """Remove the guard before autograd accumulates, which would add to it."""
        del grad
        param = reference()
        assert param is not None, "its gradient has just been computed"
        if isinstance(param.grad, OffloadedGradient):
            param.grad = None
            self._adding.add(param)
        else:
            self._adding.discard(param)

    def _take(self, param: Tensor) -> None:
        grad = param.grad
        if grad is None:
            return
        if grad.layout is not torch.strided:
            raise _not_dense(param, grad)
        adds = param in self._adding
        self._deliveries.deliver(grad.detach(), self._grads[param], adds=adds)
        self._adding.discard(param)
        param.grad = OffloadedGradient.of(param)


def bytes_of(params: Iterable[Tensor]) -> int:
    """Return the bytes of gradients placed end to end, each starting on a cache line."""
    return sum(align_up(param.numel() * param.element_size()) for param in params)


def _not_dense(param: Tensor, grad: Tensor) -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"gradient of a parameter of shape {tuple(param.shape)}: expected a dense tensor, got "
        f"{grad.layout}; use sparse=False in the embedding"
    )
