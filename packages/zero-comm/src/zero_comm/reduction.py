"""Reductions of values over ranks."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch.distributed as dist
from torch import Tensor


class Reduction(Enum):
    """MEAN is the sum divided by the world size, in that order."""

    MEAN = "mean"
    SUM = "sum"


def finish_mean(total: Tensor, *, op: Reduction, world_size: int) -> None:
    """Turn a sum over ranks into what `op` asks for, in place."""
    if op is Reduction.MEAN and world_size > 1:
        total.div_(world_size)


def torch_op(op: Reduction) -> Any:
    """Return torch's name of a reduction."""
    return dist.ReduceOp.AVG if op is Reduction.MEAN else dist.ReduceOp.SUM
