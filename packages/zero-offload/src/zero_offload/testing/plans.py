"""Planners: arithmetic, which a test asks without an optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from zero_offload.adam.fused import pieces_of
from zero_offload.state.subgroups import (
    ALIGN_BYTES,
    CUT_NUMEL,
    PAGE_BYTES,
    Entry,
    Item,
    Residence,
    Shares,
    SubGroup,
    plan_subgroups,
)

__all__ = [
    "ALIGN_BYTES",
    "CUT_NUMEL",
    "PAGE_BYTES",
    "Entry",
    "Item",
    "Residence",
    "Shares",
    "SubGroup",
    "fused_pieces",
    "plan_subgroups",
]


def fused_pieces(
    tensors: Sequence[Tensor], *, out: Tensor, step: Tensor, piece_numel: int
) -> np.recarray:
    """Return the piece of each block of FusedAdam's kernel: addresses and numel.

    Args:
        tensors: Parameter (or its master), gradient, first and second moment, of one numel.
        out: The tensor that the parameter is rounded into.
        step: The step count.
        piece_numel: The numel of the largest piece.
    """
    param, grad, first, second = tensors
    pieces = pieces_of((param, grad, first, second, None, out, step), piece_numel)
    return pieces.view(np.recarray)
