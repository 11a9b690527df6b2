"""The norm of gradients where they are, read once."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _native
from ._native._abi import DTYPES, ISAS


def total_norm(grads: Sequence[Tensor], norm_type: float) -> float:
    """The norm of all gradients as one vector; inf or nan where torch's is. Local, blocking."""
    if norm_type == 2.0:
        return math.sqrt(math.fsum(_sum_of_squares(grad) for grad in grads))
    norms = [float(torch.linalg.vector_norm(grad.float(), norm_type)) for grad in grads]
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), norm_type))


def _sum_of_squares(grad: Tensor) -> float:
    kernels = _native.kernels()
    if kernels is None or not grad.is_cpu or grad.dtype not in DTYPES or not grad.is_contiguous():
        return float(torch.linalg.vector_norm(grad, dtype=_wide(grad))) ** 2
    total, num_not_finite = ctypes.c_double(), ctypes.c_int64()
    kernels.library.zero_take(
        ISAS[kernels.isa],
        grad.data_ptr(),
        DTYPES[grad.dtype],
        None,
        0,
        grad.numel(),
        ctypes.byref(total),
        ctypes.byref(num_not_finite),
    )
    if num_not_finite.value:  # left out of the sum: torch says which of the two
        return float(torch.linalg.vector_norm(grad.float()))
    return total.value


def _wide(grad: Tensor) -> torch.dtype:
    return torch.float64 if grad.is_cpu or grad.dtype is torch.float64 else torch.float32
