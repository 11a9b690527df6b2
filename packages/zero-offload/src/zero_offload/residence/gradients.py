"""Where reduced gradients wait for a step on the host."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, final

import torch
from attrs import define, field, frozen
from torch import Tensor

from zero_offload.memory.arena import HostArena
from zero_offload.memory.copies import copy_beside

_STAGED: Final = 2  # gradients to be added that are on their way at a time


@frozen(eq=False)
class _Delivery:
    """A copy under way. `adds_to` is where it is to be added once it is here."""

    event: Any
    source: Tensor
    copy: Tensor
    adds_to: Tensor | None


@final
@define(eq=False)
class HostGradients:
    """Page-locked memory for gradients, which leave the device as they come.

    Args:
        arena: Whose memory.
    """

    arena: HostArena
    _under_way: deque[_Delivery] = field(factory=deque, init=False)
    _staging: dict[int, list[Tensor]] = field(factory=dict, init=False)  # free, by size in bytes
    _streams: dict[torch.device, Any] = field(factory=dict, init=False)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for a gradient: 1-D, zero, on the host; released with its last view.

        Raises:
            BudgetError: The host does not have it.
        """
        return self.arena.allocate(numel, dtype=dtype, name="gradients")

    def deliver(self, received: Tensor, into: Tensor, *, adds: bool) -> None:
        """Begin to bring a gradient to the host, in the place of what is there or added to it.

        Args:
            received: 1-D; lent until `settle`.
            into: As many elements of memory from `allocate`.
            adds: To what is there.
        """
        if received.is_cpu:
            into.add_(received) if adds else into.copy_(received)
            return
        while adds and sum(each.adds_to is not None for each in self._under_way) >= _STAGED:
            self._land()
        copy = self._take_staging(received) if adds else into
        event = copy_beside(received, copy, self._streams)
        self._under_way.append(_Delivery(event, received, copy, into if adds else None))

    def settle(self) -> None:
        """Block until all that was delivered is there."""
        while self._under_way:
            self._land()

    def _land(self) -> None:
        delivery = self._under_way.popleft()
        delivery.event.synchronize()
        if delivery.adds_to is not None:
            delivery.adds_to.add_(delivery.copy)
            self._staging.setdefault(delivery.copy.nbytes, []).append(delivery.copy)

    def _take_staging(self, like: Tensor) -> Tensor:
        free = self._staging.get(like.nbytes)
        if free:
            return free.pop().view(like.dtype)
        return self.arena.allocate(like.numel(), dtype=like.dtype, name="gradients to be added")
