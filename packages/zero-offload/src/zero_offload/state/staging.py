"""Between a device and the host during a step: copies through two buffers, in turns."""

from __future__ import annotations

from typing import Any, final

import torch
from attrs import define, field
from torch import Tensor

from zero_offload.memory.arena import HostArena

from .subgroups import align_up


@final
@define(eq=False)
class Staging:
    """Host memory through which a device's tensors pass while their sub-group is stepped.

    Copies are asynchronous where memory is page-locked; on the device they follow the current
    stream.

    Args:
        arena: Whose memory it is.
    """

    arena: HostArena
    _buffers: list[Tensor] = field(factory=list, init=False)
    _events: list[list[Any]] = field(factory=lambda: [[], []], init=False)  # of what was sent
    _turn: int = field(default=0, init=False)
    _cursor: int = field(default=0, init=False)
    _devices: set[torch.device] = field(factory=set, init=False)  # of what is under way

    def reserve(self, nbytes: int) -> None:
        """Take two buffers for at least `nbytes` each; see `room_of`.

        Raises:
            BudgetError: The host has not so much.
        """
        if not self._buffers or nbytes > self._buffers[0].nbytes:
            self._buffers = []
            self._buffers = [self.arena.allocate(nbytes, name="staging") for _ in range(2)]

    def begin(self) -> None:
        """Begin another sub-group, in the buffer whose copies are the older ones."""
        self._turn, self._cursor = 1 - self._turn, 0
        self._wait_for_sent()
        self._events[self._turn] = []

    def fetch(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor to the host; one that is there already is given back itself."""
        return tensor if is_here(tensor) else self._copy(tensor, self._room(tensor))

    def wait(self) -> None:
        """Block until what was fetched is here."""
        for device in self._devices:
            torch.accelerator.current_stream(device).synchronize()
        self._devices = set()

    def send(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy `source`, which was stepped, to `target`, which is not here."""
        if source.dtype is not target.dtype:  # converted here, half as much travels
            source = self._room(target).copy_(source)
        self._copy(source, target)

    def end(self, *, waits: bool) -> None:
        """The sub-group is stepped; what was sent may still be under way.

        Args:
            waits: Block until it is there: the memory it was sent from may be another's then.
        """
        for device in self._devices:
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            self._events[self._turn].append(event)
        self._devices = set()
        if waits:
            self._wait_for_sent()

    def _wait_for_sent(self) -> None:
        for event in self._events[self._turn]:
            event.synchronize()

    def _copy(self, source: Tensor, into: Tensor) -> Tensor:
        into.copy_(source, non_blocking=True)
        device = into.device if source.is_cpu else source.device
        if device.type != "cpu":  # whose copies are done when they return
            self._devices.add(device)
        return into

    def _room(self, tensor: Tensor) -> Tensor:
        """Memory for one like it."""
        start = self._cursor
        self._cursor += align_up(tensor.nbytes)
        buffer = self._buffers[self._turn]
        assert self._cursor <= buffer.nbytes, f"{self._cursor} of {buffer.nbytes} bytes of staging"
        return buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def is_here(tensor: Tensor) -> bool:
    """Whether the host's kernels can step it."""
    return tensor.is_cpu


def room_of(numel: int, param: Tensor, grad_is_here: bool) -> int:
    """What a piece needs while it is stepped: itself, and its gradient, which masters take fp32."""
    size = param.element_size()
    return align_up(numel * size) + (0 if grad_is_here else align_up(numel * max(4, size)))
