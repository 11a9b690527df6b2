"""What a partitioned model asks of those who keep values outside the device: protocols."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

MASTER: Final = "master"  # the entry of a state that is the value that is stepped

Param = nn.Parameter
Groups = Sequence[dict[str, Any]]

# Called with targets that are about to be stepped: from then on, until it is called with others,
# `target.data` is memory in which they are.
Opening = Callable[[Sequence[Param]], None]


class Footprint(Protocol):
    """Bytes that are held, by place; small things, such as step counts, are not counted."""

    @property
    def device_bytes(self) -> int:
        """Beside the parameters."""

    @property
    def host_bytes(self) -> int:
        """Of host memory."""

    @property
    def disk_bytes(self) -> int:
        """Of files."""


class OptimizerOffload(Protocol):
    """Keeps the optimizer's state of this rank's shards, and steps them. Local.

    A target stands for one parameter's shard: a parameter of the shard's shape and of the model's
    dtype, which views memory while it is open, or always where the shard rests on the device.
    Results are those of the optimizer's own step.
    """

    @property
    def footprint(self) -> Footprint:
        """What it holds."""

    def step(
        self, groups: Groups, grads: Mapping[Param, Tensor], *, factor: float, opening: Opening
    ) -> None:
        """Step these targets. Blocking, or it goes on after its return; see `DelayedOffload`.

        Args:
            groups: The param groups, with the numbers that they have now.
            grads: By target, of its shape; not changed.
            factor: What they are multiplied by.
            opening: To be called before targets are written, some at a time, in their order; and
                with none at the end. What it raises tears the step as other errors do.
        """

    def write_numbers(self, groups: Groups, /) -> None:
        """Put what the last step has counted in into the param groups, when theirs has returned."""

    def read_ahead(self) -> None:
        """A step may follow, as a step or the begin of a backward shows: begin to read for it."""

    def started(self, *, besides: Collection[str]) -> Sequence[Param]:
        """Targets that have state besides these entries, in order."""

    def written_only(self) -> Collection[Param]:
        """Targets that a step writes and does not read, as it begins with their masters."""

    def hides_master(self, param: Param, /) -> bool:
        """Whether a target's master is its value, and no entry of the optimizer's own."""

    def read(
        self, params: Iterable[Param], /, names: Collection[str] | None = None
    ) -> dict[Param, dict[str, Any]]:
        """Copies, on the host, of their state; of these entries only, or all of them. Blocking."""

    def describe(self, params: Iterable[Param], /) -> dict[Param, dict[str, Any]]:
        """As `read`, without reading: large tensors have shape and dtype, and no such memory."""

    def mend(self) -> None:
        """All states are going to be replaced: an error that left some torn is forgotten."""

    def write(self, states: Mapping[Param, Mapping[str, Any]], *, replaces: bool) -> None:
        """Put entries in the place of theirs.

        Args:
            states: By target; tensors of its shape or small ones, of any dtype.
            replaces: Whether entries go for which there is no new one, but for hidden masters.
        """

    def let_go(self) -> None:
        """Keep no view of targets' memory, which is going to be given back for a while."""


class DelayedOffload(OptimizerOffload, Protocol):
    """Its `step` returns while it goes on, and holds new values back until `bring_in`.

    Every target has a master, from the start on: what is stepped is not what the model computes
    with. What `started`, `read` and `write` say is as after the step.
    """

    def held_back(self) -> Collection[Param]:
        """Targets whose new values are held back, in order. Blocks until these are known."""

    def bring_in(self, opening: Opening) -> None:
        """Give targets the values that are held back, if any are; `opening` is as for `step`."""


# Takes the room for state now, so that a lack of it shows before training: of an optimizer, for
# targets with the position of their param group, in the order of units; and the dtype of masters by
# that of targets that have one. One that the optimizer would have besides, of a narrow one, is the
# only one.
OpenState = Callable[
    [torch.optim.Optimizer, Mapping[Param, int], Mapping[torch.dtype, torch.dtype]],
    OptimizerOffload,
]


class Pending(Protocol):
    """What was begun."""

    @property
    def wait(self) -> Callable[[], object]:
        """Blocks until it is done, or on CUDA until the current stream will wait for it."""


class TensorHome(Protocol):
    """Keeps one rank's shards of parameters, by the number of their flat buffer. Local.

    Shards that rest here are not trained themselves: masters are, wherever they are.
    """

    def allocate(self, shards: Mapping[int, Tensor]) -> None:
        """Take the room for these now, so that a lack of it shows before training.

        Args:
            shards: 1-D, padding included, on meta.
        """

    def read(self, index: int, into: Tensor) -> Pending:
        """Begin to copy a shard into memory on the device, which is lent until it is done."""

    def expect(self, indices: Sequence[int]) -> None:
        """These are read next, in this order: begin with as many as there is room for."""

    def write(self, index: int, values: Tensor) -> None:
        """Begin to keep these values, in place of what there is. Reads that begin later see them.

        Args:
            index: Of the shard.
            values: 1-D, of its size, of any floating dtype, on any device. They are read on the
                current stream.
        """

    def open(self, index: int, *, reads: bool) -> Tensor:
        """Host memory of a shard, to be changed until `close`. Blocks while others use it.

        It holds the shard's values only if it `reads`; else anything, and all of it is written.
        """

    def close(self, index: int) -> None:
        """Begin to keep what was opened. Reads that begin later see it."""

    def settle(self) -> None:
        """Block until all that was closed is kept.

        Raises:
            Exception: Something of it could not be; which shard, and why.
        """

    @property
    def host_bytes(self) -> int:
        """Of host memory that it holds now."""

    @property
    def disk_bytes(self) -> int:
        """Of files that it holds now."""

    def another(self) -> TensorHome:
        """An empty one of the same kind, in the same place; it ends before this one does."""

    def end(self) -> None:
        """Release everything. Again: nothing happens."""


class GradientHome(Protocol):
    """Host memory for this rank's shards of gradients, which leave the device as they come. Local.

    The first backward's gradient is copied there, that of each further one is added there.
    """

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for a shard: 1-D, zero, on the host; released with its last view."""

    def deliver(self, received: Tensor, into: Tensor, *, adds: bool) -> None:
        """Begin to bring what a reduction has left on the device to the host.

        Args:
            received: 1-D, this rank's part of the gradients of a buffer, or of one of its
                parameters; lent until `settle`.
            into: As many elements of memory from `allocate`.
            adds: To what is there; else in its place.
        """

    def settle(self) -> None:
        """Block until all that was delivered is there."""


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

    @property
    def num_bytes(self) -> int:
        """Of all its elements."""
        return self.shape.numel() * self.dtype.itemsize

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened tensor: 1-D, of `dtype`, on the CPU."""

    def read_into(self, memory: Tensor, start: int) -> None:
        """Fill 1-D memory, of any dtype and device, with the elements from `start` on."""
        memory.copy_(self.read(start, start + memory.numel()))
