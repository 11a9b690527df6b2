"""What stands in `param.grad` while the gradient is on the host. Any use raises."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from ._errors import DepartedGradientError
from ._torch_compat import as_subclass_sharing_memory, plain_call


@final
class DepartedGradient(Tensor):
    """A guard: it has the gradient's shape, dtype and device, and no values.

    So torch's `clip_grad_norm_(model.parameters())` stops with a message where it would otherwise
    find no gradients and do nothing; and whoever sets `param.grad = None` drops the gradient.
    """

    @classmethod
    def of(cls, param: Tensor) -> DepartedGradient:
        """For a parameter; costs one element."""
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
        return f"DepartedGradient(shape={tuple(self.shape)}: the gradient is on the host)"


_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}  # attributes that give the elements away
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
