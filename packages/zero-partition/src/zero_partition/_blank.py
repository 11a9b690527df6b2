"""Memory that says of itself that nobody has written it yet."""

from __future__ import annotations

import torch
from torch import Tensor

# NOTE(blank): all bits set is NaN in every float dtype, eight bits wide or more, so that arithmetic
# on unwritten memory stays unwritten. Dtypes without NaN get a pattern that no table of positions,
# mask or count holds by accident.
_NAN_BYTE = 0xFF
_ODD_BYTE = 0xA5


def fill_blank(tensor: Tensor) -> None:
    """Mark every element of a contiguous tensor as not yet written. Local."""
    byte = _NAN_BYTE if _has_nan(tensor) else _ODD_BYTE
    with torch.no_grad():
        tensor.detach().reshape(-1).view(torch.uint8).fill_(byte)


def has_blank(tensor: Tensor) -> bool:
    """Whether an element still has its mark, or is NaN. Local."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return False
    if _has_nan(tensor):
        if flat.dtype.itemsize == 1:  # few operations know these dtypes
            flat = flat.to(torch.float32)
        return bool(torch.isnan(flat).any())
    as_bytes = flat.contiguous().view(torch.uint8).view(flat.numel(), -1)
    return bool((as_bytes == _ODD_BYTE).all(dim=1).any())


def _has_nan(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
