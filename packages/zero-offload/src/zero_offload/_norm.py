"""The norm of gradients where they are, read once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _native
from ._native._abi import DTYPES
from ._take import take
from ._team import Team


def total_norm(grads: Sequence[Tensor], norm_type: float, team: Team) -> float:
    """The norm of all gradients as one vector; inf or nan where torch's is. Local, blocking."""
    if norm_type == 2.0:
        return math.sqrt(math.fsum(_sum_of_squares(grad, team) for grad in grads))
    norms = [float(torch.linalg.vector_norm(grad.float(), norm_type)) for grad in grads]
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), norm_type))


def _sum_of_squares(grad: Tensor, team: Team) -> float:
    if grad.is_cpu and grad.dtype in DTYPES and grad.is_contiguous():
        taken = take(grad, None, adds=False, kernels=_native.kernels(), team=team)
        if not taken.num_not_finite:
            return taken.sum_of_squares
    # On a device; or not finite, where torch's norm says which of inf and nan it is.
    return float(torch.linalg.vector_norm(grad, dtype=_wide(grad))) ** 2


def _wide(grad: Tensor) -> torch.dtype:
    return torch.float64 if grad.is_cpu or grad.dtype is torch.float64 else torch.float32
