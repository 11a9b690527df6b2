"""The norm of gradients where they are, read once."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from zero_offload import _native
from zero_offload._native.library import DTYPES, ISAS

from .parallel import Team

CHUNK_NUMEL: Final = 2**18  # sums are per chunk, so that they do not depend on threads


def total_norm(grads: Sequence[Tensor], norm_type: float, team: Team) -> float:
    """The norm of all gradients as one vector; inf or nan where torch's is. Local, blocking."""
    if norm_type == 2.0:
        return math.sqrt(math.fsum(_sum_of_squares(grad, team) for grad in grads))
    norms = [float(torch.linalg.vector_norm(grad.float(), norm_type)) for grad in grads]
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), norm_type))


def _sum_of_squares(grad: Tensor, team: Team) -> float:
    """Of kernels the same whoever shares the work; of plain torch maybe other in the last bits."""
    if grad.is_cpu and grad.dtype in DTYPES and grad.is_contiguous():
        found = _sum_of_finite(grad, team)
        if found is not None:
            return found
    # On a device; or not finite, where torch's norm says which of inf and nan it is.
    is_wide = grad.is_cpu or grad.dtype is torch.float64
    wide = torch.float64 if is_wide else torch.float32
    return float(torch.linalg.vector_norm(grad, dtype=wide)) ** 2


def _sum_of_finite(grad: Tensor, team: Team) -> float | None:
    """In double; None if inf or nan is among them."""
    kernels = _native.kernels()
    cuts = range(0, grad.numel(), CHUNK_NUMEL)
    if kernels is None:
        parts = [grad.view(-1)[at : at + CHUNK_NUMEL].float() for at in cuts]
        if not all(part.isfinite().all() for part in parts):
            return None
        return math.fsum(part.double().square().sum().item() for part in parts)
    sums, bad = (ctypes.c_double * len(cuts))(), (ctypes.c_int64 * len(cuts))()
    isa, dtype, start = ISAS[kernels.isa], DTYPES[grad.dtype], grad.data_ptr()

    def measure(first: int, last: int) -> None:
        for k in range(first, last):
            kernels.library.zero_sum_squares(
                isa,
                start + cuts[k] * grad.element_size(),
                dtype,
                min(CHUNK_NUMEL, grad.numel() - cuts[k]),
                ctypes.byref(sums, k * 8),
                ctypes.byref(bad, k * 8),
            )

    team.divide(len(cuts), len(cuts), measure)
    return None if any(bad) else math.fsum(sums)
