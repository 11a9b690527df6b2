"""Who keeps optimizer state outside the device, and steps shards there; others implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor, nn

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


class AbstractUpdater(ABC):
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
