"""Gradients that wait for the step in host memory, and leave the device while backward goes on."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, final

import torch
from attrs import define, field, frozen
from torch import Tensor
from zero_offload import HostArena
from zero_partition import AbstractGradientHome

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
class HostGradients(AbstractGradientHome):
    """In page-locked memory, copied on a stream of its own.

    Args:
        arena: Whose memory.
    """

    arena: HostArena
    _under_way: deque[_Delivery] = field(factory=deque, init=False)
    _staging: dict[int, list[Tensor]] = field(factory=dict, init=False)  # free, by size in bytes
    _stream: Any = field(default=None, init=False)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `AbstractGradientHome.allocate`."""
        return self.arena.allocate(numel, dtype=dtype, name="gradients")

    def deliver(self, received: Tensor, into: Tensor, *, adds: bool) -> None:
        """See `AbstractGradientHome.deliver`."""
        if received.is_cpu:
            into.add_(received) if adds else into.copy_(received)
            return
        while adds and sum(each.adds_to is not None for each in self._under_way) >= _STAGED:
            self._land()
        copy = self._take_staging(received) if adds else into
        event = self._copy(received, copy)
        self._under_way.append(_Delivery(event, received, copy, into if adds else None))

    def settle(self) -> None:
        """See `AbstractGradientHome.settle`."""
        while self._under_way:
            self._land()

    def _copy(self, received: Tensor, copy: Tensor) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(received.device)
        self._stream.wait_stream(torch.cuda.current_stream(received.device))
        with torch.cuda.stream(self._stream):
            copy.copy_(received, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

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
