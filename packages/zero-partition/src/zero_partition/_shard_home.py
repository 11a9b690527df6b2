"""Where the shards of parameters rest outside the device; others implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from attrs import frozen
from torch import Tensor, dtype


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


class AbstractShardHome(ABC):
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
    def another(self) -> AbstractShardHome:
        """An empty one of the same kind, in the same place; it ends before this one does."""

    @abstractmethod
    def end(self) -> None:
        """Release everything. Again: nothing happens."""
