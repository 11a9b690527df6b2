"""What weights are read from: tensors of which any run of elements can be had alone."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class AbstractRangeReader(ABC):
    """One tensor somewhere else, of which any run of elements can be had alone."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Known before anything is read."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Known before anything is read."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened tensor: 1-D, of `dtype`, on the CPU."""
