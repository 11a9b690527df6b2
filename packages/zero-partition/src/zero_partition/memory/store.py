"""Stores of a flat shard: on the device, rounded from masters, encoded, offloaded, or in state."""

# ruff: noqa: D102 - `Store` says it

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, final

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from zero_comm import AbstractCodec

from zero_partition.plan.layout import Piece

from .seams import MASTER, OptimizerOffload, ParamOffload, Pending


class Store(Protocol):
    """The values of a 1-D shard, padding included."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the values."""

    @property
    def memory(self) -> Tensor | None:
        """Return the values themselves, where they are in memory of the device; else None."""
        return None

    @property
    def codec(self) -> AbstractCodec | None:
        """Return the codec with which values are stored and sent; None if they are not encoded."""
        return None

    @property
    def param_offload(self) -> ParamOffload | None:
        """Return the offload of parameters that has the values; None if they are not in one."""
        return None

    @property
    def sent(self) -> Tensor | None:
        """Return what this rank sends in a gather; None: what `fetch` leaves in its place."""
        return self.memory

    def fetch(self, place: Tensor) -> Pending | None:
        """Begin to read the values into their place in a full buffer, where they are not `sent`."""
        return None

    def read(self) -> Tensor:
        """Return the values, to read: themselves where they are in memory, else a copy."""
        ...

    def edit(self) -> AbstractContextManager[Tensor]:
        """Return a context with the values, to be changed within; at its end they are stored."""
        return _edited(self)

    def write(self, values: Tensor) -> None:
        """Replace the values by others, rounded to their dtype."""


@contextmanager
def _edited(store: Store) -> Iterator[Tensor]:
    values = store.read()
    yield values
    store.write(values)


@final
@frozen(eq=False)
class InMemory(Store):
    """Shard in memory of the device."""

    memory: Tensor
    dtype: torch.dtype = field(init=False)

    @dtype.default
    def _dtype_of_memory(self) -> torch.dtype:
        return self.memory.dtype

    def read(self) -> Tensor:
        return self.memory

    def edit(self) -> AbstractContextManager[Tensor]:
        return nullcontext(self.memory)

    def write(self, values: Tensor) -> None:
        self.memory.copy_(values)


@final
@define(eq=False)
class Rounded(Store):
    """Shard without memory of its own: masters on the device, rounded when it is read.

    Writes are ignored, since who writes here writes to the masters too.
    """

    masters: Tensor
    dtype: torch.dtype
    # A copy of the values, only while the masters are parked.
    memory: Tensor | None = field(default=None, init=False)

    def fetch(self, place: Tensor) -> None:
        if self.memory is None:
            place.copy_(self.masters)

    def read(self) -> Tensor:
        return self.masters.to(self.dtype, copy=True) if self.memory is None else self.memory

    def materialize(self) -> None:
        """Make a copy in memory, until `drop`: the masters are going to be parked."""
        self.memory = self.read()

    def drop(self) -> None:
        """Drop the copy: the masters are on the device again."""
        self.memory = None

    def write(self, values: Tensor) -> None:
        pass


@final
@frozen(eq=False)
class OffloadedShard(Store):
    """Offloaded shard, under the number of the flat buffer."""

    param_offload: ParamOffload
    index: int
    blank: Tensor  # a meta tensor of its size and dtype
    device: torch.device
    dtype: torch.dtype = field(init=False)

    @dtype.default
    def _dtype_of_blank(self) -> torch.dtype:
        return self.blank.dtype

    def fetch(self, place: Tensor) -> Pending:
        return self.param_offload.read(self.index, place)

    def read(self) -> Tensor:
        values = torch.empty_like(self.blank, device=self.device)
        self.fetch(values).wait()
        return values

    @contextmanager
    def edit(self) -> Iterator[Tensor]:
        memory = self.param_offload.open(self.index, reads=True)
        try:
            yield memory
        finally:
            self.param_offload.close(self.index)

    def write(self, values: Tensor) -> None:
        self.param_offload.write(self.index, values)


@final
@frozen(eq=False)
class Encoded(Store):
    """Shard on the device, stored encoded, in the bytes that are sent.

    Values that are written are rounded. Writing a part, as `edit` does, changes no block of other
    values, since encoding decoded values gives the same bytes.
    """

    codec: AbstractCodec
    sent: Tensor  # uint8, 1-D
    numel: int
    dtype: torch.dtype

    @classmethod
    def of(cls, values: Tensor, codec: AbstractCodec) -> Encoded:
        """Encode these values, 1-D, of the dtype in which they are read."""
        return cls(codec, codec.encode(values), values.numel(), values.dtype)

    def read(self) -> Tensor:
        values = torch.empty(self.numel, dtype=self.dtype, device=self.sent.device)
        return self.codec.decode(self.sent, values)

    def write(self, values: Tensor) -> None:
        self.codec.encode(values.to(self.sent.device, self.dtype).contiguous(), self.sent)


@final
@frozen(eq=False)
class WithState(Store):
    """Masters that are entries of the offloaded optimizer state.

    A parameter has a master from its first step on, or from when it is written. Until then its
    master is the value of the shard.
    """

    offload: OptimizerOffload
    offloaded_params: Sequence[nn.Parameter]
    pieces: Sequence[Piece]
    shard: Store
    dtype: torch.dtype

    def read(self) -> Tensor:
        values = self.shard.read().to(self.dtype, copy=True)
        mine = [self.offloaded_params[piece.index] for piece in self.pieces]
        found = self.offload.read(mine, names=(MASTER,))
        for piece, target in zip(self.pieces, mine, strict=True):
            if MASTER in found[target]:
                values[piece.in_shard.as_slice()].copy_(found[target][MASTER].view(-1))
        return values

    def write(self, values: Tensor) -> None:
        parts = {
            self.offloaded_params[piece.index]: {
                MASTER: values[piece.in_shard.as_slice()].to(self.dtype)
            }
            for piece in self.pieces
        }
        self.offload.write(parts, replaces=False)
