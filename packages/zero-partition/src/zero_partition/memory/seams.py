"""Who keeps optimizer state outside the device, and steps shards there; others implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from attrs import frozen
from torch import Tensor, dtype, nn

MASTER: Final = "master"  # the entry of a state that is the value that is stepped

# Called with targets that are about to be stepped: from then on, until it is called with others,
# `target.data` is memory in which they are.
Opening = Callable[[Sequence[nn.Parameter]], None]


@frozen(kw_only=True)
class UpdaterReport:
    """Bytes that it holds, by place; small things, such as step counts, are not counted."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int


class OptimizerOffload(ABC):
    """Keeps the optimizer's state of this rank's shards, and steps them. Local.

    A target stands for one parameter's shard: a parameter of the shard's shape and of the model's
    dtype, which views memory while it is open, or always where the shard rests on the device.
    Results are those of the optimizer's own step.
    """

    @abstractmethod
    def plan(
        self,
        targets: Mapping[nn.Parameter, int],
        optimizer: torch.optim.Optimizer,
        *,
        masters: Mapping[torch.dtype, torch.dtype],
    ) -> None:
        """Take the room for their state now, so that a lack of it shows before training.

        Args:
            targets: With the position of their param group; in the order of units.
            optimizer: Whose class and param groups say how to step.
            masters: By dtype of targets that have a master: its dtype. One that the optimizer would
                have besides, of a narrow one, is the only one.
        """

    @abstractmethod
    def step(
        self,
        grads: Mapping[nn.Parameter, Tensor],
        *,
        factor: float,
        opening: Opening,
    ) -> None:
        """Step these targets with the numbers that the param groups have now.

        Blocking, or it goes on after its return; see `is_delayed`.

        Args:
            grads: By target, of its shape; not changed.
            factor: What they are multiplied by.
            opening: To be called before targets are written, some at a time, in their order; and
                with none at the end. What it raises tears the step as other errors do.
        """

    @property
    @abstractmethod
    def is_delayed(self) -> bool:
        """Whether `step` returns while it goes on, and holds new values back until `bring_in`.

        Every target then has a master, from the start on: what is stepped is not what the model
        computes with. What `started`, `read` and `write` say is as after the step.
        """

    @abstractmethod
    def held_back(self) -> Collection[nn.Parameter]:
        """Targets whose new values are held back, in order. Blocks until these are known."""

    @abstractmethod
    def bring_in(self, opening: Opening) -> None:
        """Give targets the values that are held back, if any are.

        Args:
            opening: As for `step`.
        """

    @abstractmethod
    def begin_backward(self) -> None:
        """A backward has begun, which a step may follow: read ahead."""

    @abstractmethod
    def started(self) -> Collection[nn.Parameter]:
        """Targets that have more than a master, in order."""

    @abstractmethod
    def written_only(self) -> Collection[nn.Parameter]:
        """Targets that a step writes and does not read, as it begins with their masters."""

    @abstractmethod
    def hides_master(self, target: nn.Parameter) -> bool:
        """Whether its master is a value of the parameter, and no entry of the optimizer's own."""

    @abstractmethod
    def read(
        self, targets: Iterable[nn.Parameter], names: Collection[str] | None = None
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Copies, on the host, of their state; of these entries only, or all of them. Blocking."""

    @abstractmethod
    def describe(self, targets: Iterable[nn.Parameter]) -> dict[nn.Parameter, dict[str, Any]]:
        """As `read`, of those with more than a master, without reading: large tensors are blank.

        They have the shape and dtype, and no memory of that size.
        """

    @abstractmethod
    def write(self, states: Mapping[nn.Parameter, Mapping[str, Any]], *, replaces: bool) -> None:
        """Put entries in the place of theirs.

        Args:
            states: By target; tensors of its shape or small ones, of any dtype.
            replaces: Whether entries go for which there is no new one, but for hidden masters.
        """

    @abstractmethod
    def let_go(self) -> None:
        """Keep no view of targets' memory, which is going to be given back for a while."""

    @property
    @abstractmethod
    def report(self) -> UpdaterReport:
        """What it holds."""

    @abstractmethod
    def end(self) -> None:
        """Release everything. Again: nothing happens."""


# ---- Where the shards of parameters rest outside the device; others implement it ----


class Pending(Protocol):
    """What was begun."""

    def wait(self) -> object:
        """Block until it is done, or on CUDA until the current stream will wait for it."""


@frozen
class ShardSize:
    """One shard: a 1-D tensor, padding included."""

    numel: int
    dtype: dtype

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return self.numel * self.dtype.itemsize


class TensorHome(ABC):
    """Keeps one rank's shards of parameters, by the number of their flat buffer. Local.

    Shards that rest here are not trained themselves: masters are, wherever they are.
    """

    @abstractmethod
    def allocate(self, sizes: Mapping[int, ShardSize]) -> None:
        """Take the room for these shards now, so that a lack of it shows before training."""

    @abstractmethod
    def read(self, index: int, into: Tensor) -> Pending:
        """Begin to copy a shard into memory on the device, which is lent until it is done."""

    @abstractmethod
    def expect(self, indices: Sequence[int]) -> None:
        """These are read next, in this order: begin with as many as there is room for."""

    @abstractmethod
    def open(self, index: int, *, reads: bool) -> Tensor:
        """Host memory of a shard, to be changed until `close`.

        It holds the shard's values only if it `reads`; else anything, and all of it is written.

        Blocks until nothing else uses that memory.
        """

    @abstractmethod
    def close(self, index: int) -> None:
        """Begin to keep what was opened. Reads that begin later see it."""

    @abstractmethod
    def settle(self) -> None:
        """Block until all that was closed is kept.

        Raises:
            Exception: Something of it could not be; which shard, and why.
        """

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Of host memory that it holds now."""

    @property
    @abstractmethod
    def disk_bytes(self) -> int:
        """Of files that it holds now."""

    @abstractmethod
    def another(self) -> TensorHome:
        """An empty one of the same kind, in the same place; it ends before this one does."""

    @abstractmethod
    def end(self) -> None:
        """Release everything. Again: nothing happens."""


# ---- Where reduced gradients wait for the step outside the device; others implement it ----


class GradientHome(ABC):
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


# ---- What weights are read from: tensors of which any run of elements can be had alone ----


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
