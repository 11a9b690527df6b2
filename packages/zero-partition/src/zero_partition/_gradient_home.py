"""Where reduced gradients wait for the step outside the device; others implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class AbstractGradientHome(ABC):
    """Host memory for this rank's shards of gradients, which leave the device as they come. Local.

    The first backward's gradient is copied there, that of each further one is added there.
    """

    @abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for a shard: 1-D, zero, on the host; released with its last view."""

    @abstractmethod
    def deliver(self, received: Tensor, into: Tensor, *, adds: bool) -> None:
        """Begin to bring what a reduction has left on the device to the host.

        Args:
            received: 1-D, this rank's part of the gradients of a buffer, or of one of its
                parameters; lent until `settle`.
            into: As many elements of memory from `allocate`.
            adds: To what is there; else in its place.
        """

    @abstractmethod
    def settle(self) -> None:
        """Block until all that was delivered is there."""
