"""Where a flat shard rests: in memory, in its masters, encoded, at a home, or with the state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import torch
from attrs import field, frozen
from torch import Tensor, nn
from zero_comm import AbstractCodec

from zero_partition.chained import ChainedOptimizer
from zero_partition.errors import PartitionError
from zero_partition.plan.layout import BufferPlan, Piece
from zero_partition.plan.stages import Placement, Placements, Precision

from .seams import MASTER, OptimizerOffload, TensorHome


class AbstractStore(ABC):
    """The values of a 1-D shard, padding included."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the values."""

    @property
    def memory(self) -> Tensor | None:
        """The values themselves, where they rest in memory of the device."""
        return None

    @abstractmethod
    def read(self) -> Tensor:
        """The values, to look at: themselves where they rest in memory, else a copy."""

    @abstractmethod
    def edit(self) -> AbstractContextManager[Tensor]:
        """The values, to be changed within the context; they are kept at its end."""

    @abstractmethod
    def write(self, values: Tensor) -> None:
        """Put others in their place, rounded to their dtype."""


@final
@frozen(eq=False)
class InMemory(AbstractStore):
    """On the device."""

    memory: Tensor
    dtype: torch.dtype = field(init=False)

    @dtype.default
    def _dtype_of_memory(self) -> torch.dtype:
        return self.memory.dtype

    def read(self) -> Tensor:
        """See `AbstractStore.read`."""
        return self.memory

    def edit(self) -> AbstractContextManager[Tensor]:
        """See `AbstractStore.edit`."""
        return nullcontext(self.memory)

    def write(self, values: Tensor) -> None:
        """See `AbstractStore.write`."""
        self.memory.copy_(values)


@final
@frozen(eq=False)
class Rounded(AbstractStore):
    """Nothing of its own: what masters on the device round to.

    What is written goes to the masters, by who writes it, and so to nowhere here.
    """

    masters: Tensor
    dtype: torch.dtype

    def read(self) -> Tensor:
        """See `AbstractStore.read`."""
        return self.masters.to(self.dtype, copy=True)

    def edit(self) -> AbstractContextManager[Tensor]:
        """See `AbstractStore.edit`."""
        return nullcontext(self.read())

    def write(self, values: Tensor) -> None:
        """See `AbstractStore.write`."""


@final
@frozen(eq=False)
class AtHome(AbstractStore):
    """At a home, under the number of the flat buffer."""

    home: TensorHome
    index: int
    blank: Tensor  # of its size and dtype, on meta
    device: torch.device
    dtype: torch.dtype = field(init=False)

    @dtype.default
    def _dtype_of_blank(self) -> torch.dtype:
        return self.blank.dtype

    def read(self) -> Tensor:
        """See `AbstractStore.read`."""
        values = torch.empty_like(self.blank, device=self.device)
        self.home.read(self.index, values).wait()
        return values

    @contextmanager
    def edit(self) -> Iterator[Tensor]:
        """See `AbstractStore.edit`."""
        memory = self.home.open(self.index, reads=True)
        try:
            yield memory
        finally:
            self.home.close(self.index)

    def write(self, values: Tensor) -> None:
        """See `AbstractStore.write`."""
        self.home.open(self.index, reads=False).copy_(values)
        self.home.close(self.index)


@final
@frozen(eq=False)
class Encoded(AbstractStore):
    """On the device, in the bytes in which they travel too.

    What is written comes back rounded. To write a part, as `edit` does, changes no block of others,
    since to encode again what was decoded gives the same bytes.
    """

    codec: AbstractCodec
    wire: Tensor  # uint8, 1-D
    numel: int
    dtype: torch.dtype

    @classmethod
    def of(cls, values: Tensor, codec: AbstractCodec) -> Encoded:
        """These values, 1-D, of the dtype in which they are read."""
        return cls(codec, codec.encode(values), values.numel(), values.dtype)

    def read(self) -> Tensor:
        """See `AbstractStore.read`."""
        values = torch.empty(self.numel, dtype=self.dtype, device=self.wire.device)
        return self.codec.decode(self.wire, values)

    @contextmanager
    def edit(self) -> Iterator[Tensor]:
        """See `AbstractStore.edit`."""
        values = self.read()
        yield values
        self.write(values)

    def write(self, values: Tensor) -> None:
        """See `AbstractStore.write`."""
        self.codec.encode(values.to(self.wire.device, self.dtype).contiguous(), self.wire)


@final
@frozen(eq=False)
class WithState(AbstractStore):
    """Masters, among the entries of the optimizer's state.

    A parameter has one from its first step on, or from when it is written; until then its master is
    what the shard is.
    """

    offload: OptimizerOffload
    targets: Sequence[nn.Parameter]
    pieces: Sequence[Piece]
    shard: AbstractStore
    dtype: torch.dtype

    def read(self) -> Tensor:
        """See `AbstractStore.read`."""
        resting = self.shard.read()
        values = resting.to(self.dtype, copy=True)
        mine = [self.targets[piece.index] for piece in self.pieces]
        found = self.offload.read(mine, names=(MASTER,))
        for piece, target in zip(self.pieces, mine, strict=True):
            if MASTER in found[target]:
                values[piece.in_shard.as_slice()].copy_(found[target][MASTER].view(-1))
        return values

    @contextmanager
    def edit(self) -> Iterator[Tensor]:
        """See `AbstractStore.edit`."""
        values = self.read()
        yield values
        self.write(values)

    def write(self, values: Tensor) -> None:
        """See `AbstractStore.write`."""
        parts = {
            self.targets[piece.index]: {MASTER: values[piece.in_shard.as_slice()].to(self.dtype)}
            for piece in self.pieces
        }
        self.offload.write(parts, replaces=False)


@frozen(kw_only=True)
class RestPlan:
    """Which kinds rest outside the device, and whether that is another memory."""

    params: bool = False  # shards of parameters that rest sharded
    state: bool = False  # optimizer state and masters
    grads: bool = False  # reduced gradients
    is_delayed: bool = False  # updates hold their values back
    host_is_device: bool = False  # the device is the CPU

    def master_of(
        self, precision: Precision, plan: BufferPlan, placement: Placement
    ) -> torch.dtype | None:
        """Dtype of the masters of a buffer whose parameters rest so, None if it has none.

        What rests elsewhere than where it is stepped is not stepped itself: a copy that is needed
        anyway to step it would have to be read first. Nor is what the model still computes with.
        """
        if not plan.trainable:
            return None
        chosen = precision.master_of(plan.dtype)
        is_at_home = self.params and placement is Placement.SHARDED
        is_elsewhere = is_at_home or (
            self.state and (self.is_delayed or self.params or not self.host_is_device)
        )
        return plan.dtype if chosen is None and is_elsewhere else chosen

    def training_of(
        self, precision: Precision, plan: BufferPlan, placement: Placement
    ) -> torch.dtype:
        """In which its values are updated, and its gradients added up."""
        return self.master_of(precision, plan, placement) or plan.dtype

    def check(
        self,
        optimizer: torch.optim.Optimizer | None,
        placements: Placements,
        precision: Precision,
    ) -> None:
        """Raise PartitionError for what cannot rest elsewhere."""
        if self.params and placements.params is Placement.REPLICATED:
            raise PartitionError(
                "parameters were to rest outside the device, and rest whole on it at stages 0 to "
                "2; use stage 3"
            )
        if self.state and placements.optim is Placement.REPLICATED:
            raise PartitionError(
                "optimizer state was to rest outside the device, and at stage 0 it is the "
                "optimizer's own on every rank; use stage 1, which gives the same numbers"
            )
        if self.grads and not self.state:
            raise PartitionError(
                "gradients were to wait outside the device for an optimizer that steps on it; let "
                "all of the optimizer's state rest outside the device too"
            )
        if not self.state:
            return
        if optimizer is None:
            raise PartitionError(
                "optimizer state was to rest outside the device, but there is no optimizer; pass "
                "one, or leave that out"
            )
        if isinstance(optimizer, ChainedOptimizer):
            raise PartitionError(
                "optimizer state of a ChainedOptimizer cannot rest outside the device; use one "
                "optimizer, or leave its state on the device"
            )
        if precision.masters not in (torch.float32, None):
            raise PartitionError(
                f"masters that rest with the optimizer's state outside the device are float32, got "
                f"Precision(masters={precision.masters})"
            )
