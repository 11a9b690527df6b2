"""The norm of gradients where they are, read once."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from zero_offload import _native
from zero_offload._native import Kernels
from zero_offload._native._abi import DTYPES, ISAS

from .parallel import Team

CHUNK_NUMEL: Final = 2**18  # sums are per chunk, so that they do not depend on threads


@frozen
class Taken:
    """What a gradient amounts to; add them up for the norm of many."""

    sum_of_squares: float  # of what is finite
    num_not_finite: int


def take(
    source: Tensor, to: Tensor | None, *, adds: bool, kernels: Kernels | None, team: Team
) -> Taken:
    """Copy `source` to `to`, or add it, and measure it on the way. Local, blocking.

    Args:
        source: Contiguous, on the CPU, of fp32, bf16 or fp16.
        to: fp32, contiguous, as many elements; None only measures.
        adds: Whether `to` has it added, rather than becomes it.
        kernels: None for plain torch, whose sum of squares may differ in the last bits.
        team: Who shares the work; how many does not change the result.

    Returns:
        Its sum of squares in double, of which inf and nan are left out and counted.
    """
    numel = source.numel()
    cuts = range(0, numel, CHUNK_NUMEL)
    if kernels is None:
        parts = [source.view(-1)[at : at + CHUNK_NUMEL].float() for at in cuts]
        if to is not None and adds:
            to.view(-1).add_(source.view(-1))
        elif to is not None:
            to.view(-1).copy_(source.view(-1))
        finite = [part[part.isfinite()] for part in parts]
        squares = [part.double().square().sum().item() for part in finite]
        return Taken(math.fsum(squares), numel - sum(part.numel() for part in finite))

    sums, bad = (ctypes.c_double * len(cuts))(), (ctypes.c_int64 * len(cuts))()
    isa, dtype, itemsize = ISAS[kernels.isa], DTYPES[source.dtype], source.element_size()
    sources, targets = source.data_ptr(), None if to is None else to.data_ptr()

    def measure(first: int, last: int) -> None:
        for k in range(first, last):
            kernels.library.zero_take(
                isa,
                sources + cuts[k] * itemsize,
                dtype,
                None if targets is None else targets + cuts[k] * 4,
                adds,
                min(CHUNK_NUMEL, numel - cuts[k]),
                ctypes.byref(sums, k * 8),
                ctypes.byref(bad, k * 8),
            )

    team.divide(len(cuts), len(cuts), measure)
    return Taken(math.fsum(sums), sum(bad))


# ---- The norm of gradients where they are, read once ----


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
