"""Where a flat shard rests: in memory, in its masters, encoded, at a home, or with the state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import torch
from attrs import frozen
from torch import Tensor, nn
from zero_comm import AbstractCodec

from ._layout import Piece
from ._shard_home import AbstractShardHome, ShardSize
from ._updater import MASTER, AbstractUpdater


class AbstractRest(ABC):
    """The values of a 1-D shard, padding included."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the values."""

    @property
    @abstractmethod
    def memory(self) -> Tensor | None:
        """The values themselves, where they rest in memory of the device."""

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
class InMemory(AbstractRest):
    """On the device."""

    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """See `AbstractRest.dtype`."""
        return self.tensor.dtype

    @property
    def memory(self) -> Tensor:
        """See `AbstractRest.memory`."""
        return self.tensor

    def read(self) -> Tensor:
        """See `AbstractRest.read`."""
        return self.tensor

    def edit(self) -> AbstractContextManager[Tensor]:
        """See `AbstractRest.edit`."""
        return nullcontext(self.tensor)

    def write(self, values: Tensor) -> None:
        """See `AbstractRest.write`."""
        self.tensor.copy_(values)


@final
@frozen(eq=False)
class Rounded(AbstractRest):
    """Nothing of its own: what masters on the device round to.

    What is written goes to the masters, by who writes it, and so to nowhere here.
    """

    masters: Tensor
    value_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """See `AbstractRest.dtype`."""
        return self.value_dtype

    @property
    def memory(self) -> None:
        """See `AbstractRest.memory`."""
        return None

    def read(self) -> Tensor:
        """See `AbstractRest.read`."""
        return self.masters.to(self.dtype, copy=True)

    def edit(self) -> AbstractContextManager[Tensor]:
        """See `AbstractRest.edit`."""
        return nullcontext(self.read())

    def write(self, values: Tensor) -> None:
        """See `AbstractRest.write`."""


@final
@frozen(eq=False)
class AtHome(AbstractRest):
    """At a home, under the number of the flat buffer."""

    home: AbstractShardHome
    index: int
    size: ShardSize
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """See `AbstractRest.dtype`."""
        return self.size.dtype

    @property
    def memory(self) -> None:
        """See `AbstractRest.memory`."""
        return None

    def read(self) -> Tensor:
        """See `AbstractRest.read`."""
        values = torch.empty(self.size.numel, dtype=self.dtype, device=self.device)
        self.home.read(self.index, values).wait()
        return values

    @contextmanager
    def edit(self) -> Iterator[Tensor]:
        """See `AbstractRest.edit`."""
        memory = self.home.open(self.index, reads=True)
        try:
            yield memory
        finally:
            self.home.close(self.index)

    def write(self, values: Tensor) -> None:
        """See `AbstractRest.write`."""
        self.home.open(self.index, reads=False).copy_(values)
        self.home.close(self.index)


@final
@frozen(eq=False)
class Encoded(AbstractRest):
    """On the device, in the bytes in which they travel too.

    What is written comes back rounded. To write a part, as `edit` does, changes no block of others,
    since to encode again what was decoded gives the same bytes.
    """

    codec: AbstractCodec
    wire: Tensor  # uint8, 1-D
    numel: int
    value_dtype: torch.dtype

    @classmethod
    def of(cls, values: Tensor, codec: AbstractCodec) -> Encoded:
        """These values, 1-D, of the dtype in which they are read."""
        return cls(codec, codec.encode(values), values.numel(), values.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """See `AbstractRest.dtype`."""
        return self.value_dtype

    @property
    def memory(self) -> None:
        """See `AbstractRest.memory`."""
        return None

    def read(self) -> Tensor:
        """See `AbstractRest.read`."""
        values = torch.empty(self.numel, dtype=self.dtype, device=self.wire.device)
        return self.codec.decode(self.wire, values)

    @contextmanager
    def edit(self) -> Iterator[Tensor]:
        """See `AbstractRest.edit`."""
        values = self.read()
        yield values
        self.write(values)

    def write(self, values: Tensor) -> None:
        """See `AbstractRest.write`."""
        self.codec.encode(values.to(self.wire.device, self.dtype).contiguous(), self.wire)


@final
@frozen(eq=False)
class WithState(AbstractRest):
    """Masters, among the entries of the optimizer's state.

    A parameter has one from its first step on, or from when it is written; until then its master is
    what the shard is.
    """

    updater: AbstractUpdater
    targets: Sequence[nn.Parameter]
    pieces: Sequence[Piece]
    shard: AbstractRest
    master_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """See `AbstractRest.dtype`."""
        return self.master_dtype

    @property
    def memory(self) -> None:
        """See `AbstractRest.memory`."""
        return None

    def read(self) -> Tensor:
        """See `AbstractRest.read`."""
        resting = self.shard.read()
        values = resting.to(self.dtype, copy=True)
        mine = [self.targets[piece.index] for piece in self.pieces]
        found = self.updater.read(mine, names=(MASTER,))
        for piece, target in zip(self.pieces, mine, strict=True):
            if MASTER in found[target]:
                values[piece.in_shard.as_slice()].copy_(found[target][MASTER].view(-1))
        return values

    @contextmanager
    def edit(self) -> Iterator[Tensor]:
        """See `AbstractRest.edit`."""
        values = self.read()
        yield values
        self.write(values)

    def write(self, values: Tensor) -> None:
        """See `AbstractRest.write`."""
        parts = {
            self.targets[piece.index]: {MASTER: values[piece.in_shard.as_slice()].to(self.dtype)}
            for piece in self.pieces
        }
        self.updater.write(parts, replaces=False)
