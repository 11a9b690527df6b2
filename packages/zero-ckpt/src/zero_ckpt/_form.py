"""A tensor as a flat run of elements, each of them once, and a tensor of that form again."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor


@frozen
class Form:
    """Shape and strides over a flat tensor that has an element for every place in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the flat tensor: fewer than the shape has, where some are repeated."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps)

    def over(self, flat: Tensor) -> Tensor:
        """A view of a flat tensor. Local."""
        return flat.as_strided(self.shape, self.strides)


def flatten(tensor: Tensor) -> tuple[Tensor, Form]:
    """Its elements in the order of memory, and their form. Local.

    A view, of transposed, expanded and overlapping tensors too; a copy where the memory between
    its elements is not its own. The form has the tensor's strides, or those of the copy, in the
    same order.
    """
    form = Form(tuple(tensor.shape), tensor.stride())
    if form.numel > tensor.numel():
        tensor = _without_gaps(tensor)
        form = Form(form.shape, tensor.stride())
    return tensor.as_strided((form.numel,), (1,)), form


def _without_gaps(tensor: Tensor) -> Tensor:
    core = tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:  # expanded: once is enough
            core = core.narrow(dim, 0, 1)
    return core.clone(memory_format=torch.preserve_format).expand(tensor.shape)
