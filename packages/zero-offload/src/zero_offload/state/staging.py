"""Copies between a device and the host during a step, through two buffers in turns."""

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
        arena: Allocates the memory.
    """

    arena: HostArena
    _buffers: list[Tensor] = field(factory=list, init=False)
    # For each buffer, events after the copies to devices that were begun from it.
    _events: list[list[Any]] = field(factory=lambda: [[], []], init=False)
    _turn: int = field(default=0, init=False)
    _cursor: int = field(default=0, init=False)
    # Devices with copies in progress since the last `wait` or `end`.
    _devices: set[torch.device] = field(factory=set, init=False)

    def reserve(self, nbytes: int) -> None:
        """Allocate two buffers of at least `nbytes` each; see `staging_bytes_of`.

        Raises:
            BudgetError: The host does not have the memory.
        """
        if not self._buffers or nbytes > self._buffers[0].nbytes:
            self._buffers = []
            self._buffers = [self.arena.allocate(nbytes, name="staging") for _ in range(2)]

    def begin(self) -> None:
        """Begin another sub-group, in the buffer with the older copies, once these are done."""
        self._turn, self._cursor = 1 - self._turn, 0
        self._wait_for_sent()
        self._events[self._turn] = []

    def fetch(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor to the host and return the copy; return one on the host itself."""
        return tensor if is_on_host(tensor) else self._copy(tensor, self._allocate(tensor))

    def wait(self) -> None:
        """Block until all fetched tensors are on the host."""
        for device in self._devices:
            torch.accelerator.current_stream(device).synchronize()
        self._devices = set()

    def send(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy `source`, which was stepped on the host, to `target` on a device."""
        # The target's dtype is narrower. Convert before the copy, which then has fewer bytes.
        if source.dtype is not target.dtype:
            source = self._allocate(target).copy_(source)
        self._copy(source, target)

    def end(self, *, waits: bool) -> None:
        """End the sub-group after its step; the copies of `send` may still be in progress.

        Args:
            waits: Block until they are done: afterwards their sources may be used otherwise.
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
        # Copies on the CPU are done when `copy_` returns.
        if device.type != "cpu":
            self._devices.add(device)
        return into

    def _allocate(self, tensor: Tensor) -> Tensor:
        """Return memory of the buffer for a tensor of this shape and dtype."""
        start = self._cursor
        self._cursor += align_up(tensor.nbytes)
        buffer = self._buffers[self._turn]
        assert self._cursor <= buffer.nbytes, f"{self._cursor} of {buffer.nbytes} bytes of staging"
        return buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def is_on_host(tensor: Tensor) -> bool:
    """Return whether a tensor is on the host, whose kernels can step it then."""
    return tensor.is_cpu


def staging_bytes_of(numel: int, param: Tensor, is_grad_on_host: bool) -> int:
    """Return the staging bytes of a piece's step: for the piece, and its gradient if on a device.

    A gradient counts 4 bytes an element at least, since masters take it in fp32.
    """
    size = param.element_size()
    return align_up(numel * size) + (0 if is_grad_on_host else align_up(numel * max(4, size)))
