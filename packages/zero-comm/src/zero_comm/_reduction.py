"""How ranks' values are combined."""

from __future__ import annotations

from enum import Enum

from torch import Tensor


class Reduction(Enum):
    """MEAN is the sum divided by the world size, in that order."""

    MEAN = "mean"
    SUM = "sum"


def finish_mean(total: Tensor, *, op: Reduction, world_size: int) -> None:
    """Turn a sum over ranks into what `op` asks for, in place."""
    if op is Reduction.MEAN and world_size > 1:
        total.div_(world_size)
