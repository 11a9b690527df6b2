"""Where a flat shard rests: in memory, in its masters, encoded, at a home, or with the state."""

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

from .seams import MASTER, OptimizerOffload, Pending, TensorHome


class Store(Protocol):
    """The values of a 1-D shard, padding included."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""

    @property
    def memory(self) -> Tensor | None:
        """The values themselves, where they rest in memory of the device."""
        return None

    @property
    def codec(self) -> AbstractCodec | None:
        """In which they rest, and travel; None: as they are."""
        return None

    @property
    def home(self) -> TensorHome | None:
        """Who keeps them, if they rest outside the device as parameters do."""
        return None

    @property
    def sent(self) -> Tensor | None:
        """What this rank gives in a gather; None: what `fetch` leaves in its place."""
        return self.memory

    def fetch(self, place: Tensor) -> Pending | None:
        """Begin to read what is not `sent` into its place in a whole buffer."""
        return None

    def read(self) -> Tensor:
        """The values, to look at: themselves where they rest in memory, else a copy."""
        ...

    def edit(self) -> AbstractContextManager[Tensor]:
        """The values, to be changed within the context; they are kept at its end."""
        return _edited(self)

    def write(self, values: Tensor) -> None:
        """Put others in their place, rounded to their dtype."""


@contextmanager
def _edited(store: Store) -> Iterator[Tensor]:
    values = store.read()
    yield values
    store.write(values)


@final
@frozen(eq=False)
class InMemory(Store):
    """On the device."""

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
    """Nothing of its own: what masters on the device round to.

    What is written goes to the masters, by who writes it, and so to nowhere here.
    """

    masters: Tensor
    dtype: torch.dtype
    memory: Tensor | None = field(default=None, init=False)  # while masters are away

    def fetch(self, place: Tensor) -> None:
        if self.memory is None:
            place.copy_(self.masters)

    def read(self) -> Tensor:
        return self.masters.to(self.dtype, copy=True) if self.memory is None else self.memory

    def keep(self) -> None:
        """Have memory until `let_go`, since the masters go somewhere else."""
        self.memory = self.read()

    def let_go(self) -> None:
        """The masters are here again."""
        self.memory = None

    def write(self, values: Tensor) -> None:
        pass


@final
@frozen(eq=False)
class AtHome(Store):
    """At a home, under the number of the flat buffer."""

    home: TensorHome
    index: int
    blank: Tensor  # of its size and dtype, on meta
    device: torch.device
    dtype: torch.dtype = field(init=False)

    @dtype.default
    def _dtype_of_blank(self) -> torch.dtype:
        return self.blank.dtype

    def fetch(self, place: Tensor) -> Pending:
        return self.home.read(self.index, place)

    def read(self) -> Tensor:
        values = torch.empty_like(self.blank, device=self.device)
        self.fetch(values).wait()
        return values

    @contextmanager
    def edit(self) -> Iterator[Tensor]:
        memory = self.home.open(self.index, reads=True)
        try:
            yield memory
        finally:
            self.home.close(self.index)

    def write(self, values: Tensor) -> None:
        self.home.write(self.index, values)


@final
@frozen(eq=False)
class Encoded(Store):
    """On the device, in the bytes in which they travel too.

    What is written comes back rounded. To write a part, as `edit` does, changes no block of others,
    since to encode again what was decoded gives the same bytes.
    """

    codec: AbstractCodec
    sent: Tensor  # uint8, 1-D
    numel: int
    dtype: torch.dtype

    @classmethod
    def of(cls, values: Tensor, codec: AbstractCodec) -> Encoded:
        """These values, 1-D, of the dtype in which they are read."""
        return cls(codec, codec.encode(values), values.numel(), values.dtype)

    def read(self) -> Tensor:
        values = torch.empty(self.numel, dtype=self.dtype, device=self.sent.device)
        return self.codec.decode(self.sent, values)

    def write(self, values: Tensor) -> None:
        self.codec.encode(values.to(self.sent.device, self.dtype).contiguous(), self.sent)


@final
@frozen(eq=False)
class WithState(Store):
    """Masters, among the entries of the optimizer's state.

    A parameter has one from its first step on, or from when it is written; until then its master is
    what the shard is.
    """

    offload: OptimizerOffload
    targets: Sequence[nn.Parameter]
    pieces: Sequence[Piece]
    shard: Store
    dtype: torch.dtype

    def read(self) -> Tensor:
        values = self.shard.read().to(self.dtype, copy=True)
        mine = [self.targets[piece.index] for piece in self.pieces]
        found = self.offload.read(mine, names=(MASTER,))
        for piece, target in zip(self.pieces, mine, strict=True):
            if MASTER in found[target]:
                values[piece.in_shard.as_slice()].copy_(found[target][MASTER].view(-1))
        return values

    def write(self, values: Tensor) -> None:
        parts = {
            self.targets[piece.index]: {MASTER: values[piece.in_shard.as_slice()].to(self.dtype)}
            for piece in self.pieces
        }
        self.offload.write(parts, replaces=False)
