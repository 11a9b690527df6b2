"""Copies between a device and pinned host memory, beside the computation."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from attrs import define, field
from torch import Tensor

from ._torch_compat import version_of

# NOTE(copies): a copy runs on a stream of its own, and reads or writes memory of the device that
# was allocated on the stream of the computation. That memory is held until the latter stream has
# been told to wait for the copy: from then on whoever is given it next comes after the copy.


@define(eq=False)
class Copy:
    """One copy on its way. Both tensors live until it is settled."""

    target: Tensor
    source: Tensor | None  # None once it is settled
    _wait: Callable[[], None]
    stream: Any = None  # of the computation that made the tensor, and will use it
    is_torn: bool = field(default=False, init=False)  # the source was written in place meanwhile
    _version: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._version = -1 if self.source is None else version_of(self.source)

    def settle(self) -> Tensor:
        """Whatever the stream of the computation does from now on comes after the copy.

        Local; blocks no host thread.
        """
        if self.source is not None:
            self._wait()
            self.is_torn = version_of(self.source) != self._version
            self.source = None
        return self.target

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.settle()


class AbstractHost(ABC):
    """Who copies."""

    @abstractmethod
    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor lies somewhere else than on the host."""

    @abstractmethod
    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host to copy to."""

    @abstractmethod
    def away(self, source: Tensor, target: Tensor) -> Copy:
        """Begin to copy to memory that `allocate` gave."""

    @abstractmethod
    def back(self, copy: Copy) -> Copy:
        """Begin to copy what went away to new memory of the device that it came from."""


@final
@define(eq=False)
class PinnedHost(AbstractHost):
    """One more stream per device, on which copies follow one another in both directions."""

    _sides: dict[torch.device, torch.Stream] = field(factory=dict, init=False)

    def takes(self, tensor: Tensor) -> bool:
        """All but those on the CPU."""
        return tensor.device.type != "cpu"

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pinned."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def away(self, source: Tensor, target: Tensor) -> Copy:
        """After all that the current stream has been given so far."""
        stream = torch.accelerator.current_stream(source.device)
        return self._copy(source, target, stream, source.device)

    def back(self, copy: Copy) -> Copy:
        """After all that the stream of the computation has been given so far."""
        with copy.stream:
            target = torch.empty_like(copy.target, device=copy.stream.device, pin_memory=False)
        return self._copy(copy.target, target, copy.stream, target.device)

    def _copy(
        self, source: Tensor, target: Tensor, stream: torch.Stream, device: torch.device
    ) -> Copy:
        if device not in self._sides:
            self._sides[device] = torch.Stream(device)
        side = self._sides[device]
        side.wait_stream(stream)
        with side:
            target.copy_(source, non_blocking=True)
        done = side.record_event()
        return Copy(target, source, lambda: stream.wait_event(done), stream)
