"""Protocols of offload: how a partitioned model uses values outside the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

# Name of the entry of a state that is the value that is stepped.
MASTER: Final = "master"

Param = nn.Parameter
Groups = Sequence[dict[str, Any]]

# Called with targets that are about to be stepped. From then on, until it is called with others,
# `target.data` has their values.
Opening = Callable[[Sequence[Param]], None]


class OffloadedBytes(Protocol):
    """Bytes in use, by place; small things, such as step counts, are not counted."""

    @property
    def device_bytes(self) -> int:
        """Return bytes of the device's memory, without the parameters."""

    @property
    def host_bytes(self) -> int:
        """Return bytes of host memory."""

    @property
    def disk_bytes(self) -> int:
        """Return bytes of files."""


class OptimizerOffload(Protocol):
    """Offloaded optimizer state of this rank's shards, which it also steps. Local.

    A target stands for one parameter's shard: a parameter of the shard's shape and of the model's
    dtype. It views memory while it is open, or always where the shard is on the device. Results are
    those of the optimizer's own step.
    """

    @property
    def footprint(self) -> OffloadedBytes:
        """Return the bytes in use, by place."""

    def step(
        self, groups: Groups, grads: Mapping[Param, Tensor], *, factor: float, opening: Opening
    ) -> None:
        """Step these targets. Blocking, or it goes on after its return; see `DelayedOffload`.

        Args:
            groups: The param groups, with the numbers that they have now.
            grads: By target, of its shape; not changed.
            factor: By which gradients are multiplied.
            opening: To be called with targets before they are written, some at a time, in their
                order; and with none at the end. An error that it raises ends the step midway, as
                others do.
        """

    def write_numbers(self, groups: Groups, /) -> None:
        """Write the numbers that the last step has changed, such as counts, into the param groups.

        Called when the optimizer's own step has returned.
        """

    def read_ahead(self) -> None:
        """Begin to read for a step that may follow.

        Called after a step, and when a backward begins.
        """

    def started(self, *, besides: Collection[str]) -> Sequence[Param]:
        """Return the targets that have state besides these entries, in order."""

    def written_only(self) -> Collection[Param]:
        """Return targets that a step writes and does not read, as it begins with masters."""

    def hides_master(self, param: Param, /) -> bool:
        """Return whether a target's master is its value, and no entry of the optimizer's own."""

    def read(
        self, params: Iterable[Param], /, names: Collection[str] | None = None
    ) -> dict[Param, dict[str, Any]]:
        """Return copies, on the host, of the targets' state. Blocking.

        They have only the entries that are named, or all of them.
        """

    def describe(self, params: Iterable[Param], /) -> dict[Param, dict[str, Any]]:
        """Return what `read` would, unread: large tensors have shape and dtype, but no memory."""

    def mend(self) -> None:
        """Forget an error that left states torn: all states are going to be replaced."""

    def write(self, states: Mapping[Param, Mapping[str, Any]], *, replaces: bool) -> None:
        """Replace entries of the targets' state.

        Args:
            states: By target; tensors of its shape or small ones, of any dtype.
            replaces: Whether entries go for which there is no new one, but for hidden masters.
        """

    def drop_views(self) -> None:
        """Drop all views of targets' memory, which is going to be freed for a while."""


class DelayedOffload(OptimizerOffload, Protocol):
    """Offload whose `step` goes on after its return, until `apply_delayed_update`.

    Every target has a master from the start on: the step does not update what the model computes
    with. `started`, `read` and `write` see the state after the step.
    """

    def pending_params(self) -> Collection[Param]:
        """Return the targets that lack their new values, in order. Blocks until these are known."""

    def apply_delayed_update(self, opening: Opening) -> None:
        """Give targets the new values that they lack, if any; `opening` is as for `step`."""


# Opens the offload of an optimizer's state, and allocates its memory at once, so that a lack of it
# shows before training. Called with the optimizer; target -> position of its param group, in the
# order of units; and dtype of targets -> dtype of their masters, for those that have masters. If
# the optimizer keeps masters of narrow targets itself, there are no others.
OpenState = Callable[
    [torch.optim.Optimizer, Mapping[Param, int], Mapping[torch.dtype, torch.dtype]],
    OptimizerOffload,
]


class Pending(Protocol):
    """An asynchronous read."""

    @property
    def wait(self) -> Callable[[], object]:
        """Return a function that blocks until the read is done.

        On CUDA it may return once the current stream will wait for the read.
        """


class ParamOffload(Protocol):
    """Offloaded shards of one rank's parameters, by the number of their flat buffer. Local.

    These shards are not updated; their masters are, wherever they are.
    """

    def allocate(self, shards: Mapping[int, Tensor]) -> None:
        """Allocate space for these shards now, so that a lack of it shows before training.

        Args:
            shards: 1-D, padding included, on meta.
        """

    def read(self, index: int, into: Tensor) -> Pending:
        """Begin to copy a shard into memory on the device.

        That memory must not be used otherwise until the copy is done.
        """

    def expect(self, indices: Sequence[int]) -> None:
        """Begin to read shards that are needed next, in this order: as many as fit."""

    def write(self, index: int, values: Tensor) -> None:
        """Begin to store values in place of the present ones. Reads that begin later see them.

        Args:
            index: Of the shard.
            values: 1-D, of its size, of any floating dtype, on any device. They are read on the
                current stream.
        """

    def open(self, index: int, *, reads: bool) -> Tensor:
        """Return host memory of a shard, to be changed until `close`. Blocks while others use it.

        It has the shard's values only if `reads`; else its content is arbitrary, and the caller
        writes all of it.
        """

    def close(self, index: int) -> None:
        """Begin to store what was opened. Reads that begin later see it."""

    def flush(self) -> None:
        """Block until all that was closed is stored.

        Raises:
            Exception: A shard could not be stored; it says which, and why.
        """

    @property
    def host_bytes(self) -> int:
        """Return bytes of host memory in use now."""

    @property
    def disk_bytes(self) -> int:
        """Return bytes of files in use now."""

    def another(self) -> ParamOffload:
        """Return an empty one of the same kind, in the same place.

        It is ended before this one is.
        """

    def end(self) -> None:
        """Release everything. A second call does nothing."""


class GradOffload(Protocol):
    """Host memory for this rank's shards of gradients, copied there as they are reduced. Local.

    The gradient of the first backward is copied there, that of each further one is added there.
    """

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a shard: 1-D, zero, on the host; released with its last view."""

    def deliver(self, received: Tensor, into: Tensor, *, adds: bool) -> None:
        """Begin to copy reduced gradients from the device to the host.

        Args:
            received: 1-D, this rank's part of the gradients of a buffer, or of one of its
                parameters; not to be changed until `flush`.
            into: As many elements of memory from `allocate`.
            adds: Whether to add to what is there; else it is replaced.
        """

    def flush(self) -> None:
        """Block until all that was delivered has arrived."""


class AbstractRangeReader(ABC):
    """Reader of a stored tensor, of which any run of elements can be read alone."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Return the tensor's shape, which is known before anything is read."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Return the tensor's dtype, which is known before anything is read."""

    @property
    def num_bytes(self) -> int:
        """Return bytes of all elements."""
        return self.shape.numel() * self.dtype.itemsize

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened tensor: 1-D, of `dtype`, on the CPU."""

    def read_into(self, memory: Tensor, start: int) -> None:
        """Fill 1-D memory, of any dtype and device, with the elements from `start` on."""
        memory.copy_(self.read(start, start + memory.numel()))
