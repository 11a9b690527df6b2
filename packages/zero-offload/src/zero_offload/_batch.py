"""Runs of elements that one rule steps, all of the same dtypes."""

from __future__ import annotations

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor


@frozen
class Dtypes:
    """Of the tensors of a batch; `out` is None where there is none."""

    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    out: torch.dtype | None = None


@define(eq=False)
class Batch:
    """Columns: position k of each list belongs to the k-th run.

    Tensors are contiguous and on the CPU; of each, elements [starts[k], stops[k]) in memory order
    are meant. `params` are what is computed with, fp32 masters where there are any; `outs` receive
    the result once more in their own dtype. `indices` number the first element of each *tensor*
    among all that the optimizer has, for stochastic rounding.

    A batch that is used again has the same tensors but for `grads`.

    `seconds`, `largests` and `outs` are empty where the formula or the dtypes need none.
    """

    dtypes: Dtypes
    params: list[Tensor] = field(factory=list)
    grads: list[Tensor] = field(factory=list)
    firsts: list[Tensor] = field(factory=list)
    seconds: list[Tensor] = field(factory=list)
    largests: list[Tensor] = field(factory=list)
    outs: list[Tensor] = field(factory=list)
    starts: list[int] = field(factory=list)
    stops: list[int] = field(factory=list)
    indices: list[int] = field(factory=list)
    table: np.ndarray | None = field(default=None, init=False)  # of addresses, once there is one

    def written(self) -> list[list[Tensor]]:
        """The columns that a step writes."""
        columns = (self.params, self.firsts, self.seconds, self.largests, self.outs)
        return [column for column in columns if column]
