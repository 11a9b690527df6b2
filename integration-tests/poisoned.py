"""A residence whose memory is nobody else's, late and poisoned: what is skipped or early is seen.

On a CPU-only machine the host is the device, and a copy that is forgotten, or a handle that nobody
waits for, would change no number. Here it does, or it raises. Poison is every byte 0xFF: a NaN in
each floating dtype.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, final

import torch
from attrs import define, field
from torch import Tensor
from zero_comm.testing import equal
from zero_offload import AbstractStore, StoreError


def poison(memory: Tensor) -> None:
    """Whoever computes with it gets NaN."""
    _bytes_of(memory).fill_(0xFF)


def is_poison(memory: Tensor) -> bool:
    """Whether nobody has written to it."""
    return bool((_bytes_of(memory) == 0xFF).all())


def _bytes_of(memory: Tensor) -> Tensor:
    return memory.detach().view(-1).view(torch.uint8)


@define(eq=False)
class _Read:
    """A read that happens when it is waited for, and not before."""

    home: PoisonedHome
    index: int
    into: Tensor
    is_done: bool = False

    def wait(self) -> None:
        """Fill the memory that was lent."""
        if self.is_done:
            return
        self.is_done = True
        self.home.reads[self.index].remove(self)
        assert is_poison(self.into), f"shard {self.index}: memory was written to while it was lent"
        self.into.copy_(self.home.kept[self.index])


@final
@define(eq=False)
class PoisonedHome:
    """Shards in memory that is only seen through reads that were waited for."""

    kept: dict[int, Tensor] = field(factory=dict)
    reads: defaultdict[int, list[_Read]] = field(factory=lambda: defaultdict(list))
    opened: dict[int, Tensor] = field(factory=dict)
    expected: list[tuple[int, ...]] = field(factory=list)  # by call of `expect`
    is_ended: bool = False
    _shards: dict[int, Tensor] = field(factory=dict)
    _closed: list[Tensor] = field(factory=list)  # memory that is nobody's

    def allocate(self, shards: Mapping[int, Tensor]) -> None:  # noqa: D102
        assert not self._shards, "room is taken once"
        self._shards = dict(shards)

    def read(self, index: int, into: Tensor) -> _Read:  # noqa: D102
        shard = self._shards[index]
        assert index not in self.opened, f"shard {index} is read while it is open"
        assert index in self.kept, f"shard {index} is read, and was never written"
        assert (into.numel(), into.dtype) == (shard.numel(), shard.dtype), (
            f"shard {index}: {into.shape}"
        )
        poison(into)
        self.reads[index].append(_Read(self, index, into))
        return self.reads[index][-1]

    def expect(self, indices: Sequence[int]) -> None:  # noqa: D102
        assert not set(indices) - self.kept.keys(), "what is expected was never written"
        self.expected.append(tuple(indices))

    def write(self, index: int, values: Tensor) -> None:  # noqa: D102
        self.open(index, reads=False).copy_(values)
        self.close(index)

    def open(self, index: int, *, reads: bool) -> Tensor:  # noqa: D102
        assert index not in self.opened, f"shard {index} is opened twice"
        assert not self.reads[index], f"shard {index} is opened while it is read"
        self.opened[index] = torch.zeros_like(self._shards[index], device="cpu")
        if not reads:  # all of it is written, padding too
            poison(self.opened[index])
        else:
            assert index in self.kept, f"shard {index} is read, and was never written"
            self.opened[index].copy_(self.kept[index])
        return self.opened[index]

    def close(self, index: int) -> None:  # noqa: D102
        memory = self.opened.pop(index)
        assert not memory.isnan().any(), "padding shows what the memory held before"
        self.kept[index] = memory.clone()
        poison(memory)
        self._closed.append(memory)

    def flush(self) -> None:  # noqa: D102
        assert not self.opened, f"shards {list(self.opened)} are open still"
        assert all(map(is_poison, self._closed)), "a shard was written to after it was closed"
        self._closed.clear()

    @property
    def host_bytes(self) -> int:  # noqa: D102
        return sum(shard.nbytes for shard in self._shards.values())

    @property
    def disk_bytes(self) -> int:  # noqa: D102
        return 0

    def another(self) -> PoisonedHome:  # noqa: D102
        return PoisonedHome()

    def end(self) -> None:  # noqa: D102
        self.flush()
        assert not any(self.reads.values()), "a read was never waited for"
        self.kept, self._shards, self.is_ended = {}, {}, True


class _Late(Future):
    """Does its work, and what was asked of the same key before, when it is waited for."""

    def __init__(self, queue: deque[_Late], act: Callable[[], Any]) -> None:
        super().__init__()
        self._queue, self._act = queue, act
        queue.append(self)

    def exception(self, timeout: float | None = None) -> Any:
        while not self.done():
            first = self._queue.popleft()
            try:
                first.set_result(first._act())
            except Exception as error:
                first.set_exception(error)
        return super().exception(timeout)

    def result(self, timeout: float | None = None) -> Any:
        self.exception()
        return super().result(timeout)


@final
@define(eq=False)
class PoisonedStore(AbstractStore):
    """Values that are copied when the future is waited for; what was lent is poisoned meanwhile.

    A source is poisoned once it is kept: its memory is free then, and holds nothing of it.
    """

    values: dict[str, Tensor] = field(factory=dict)
    rooms: dict[str, int] = field(factory=dict)
    is_closed: bool = False
    _queues: defaultdict[str, deque[_Late]] = field(factory=lambda: defaultdict(deque))

    def allocate(self, sizes: Mapping[str, int]) -> None:  # noqa: D102
        assert not sizes.keys() & self.rooms.keys(), "room is taken once"
        self.rooms |= sizes

    def write(self, key: str, source: Tensor) -> Future[None]:  # noqa: D102
        assert source.nbytes == self.rooms[key], f"{key}: {source.nbytes} of {self.rooms[key]}"
        lent = source.clone()

        def act() -> None:
            same = equal(_bytes_of(source), _bytes_of(lent))
            assert same, f"{key}: memory was written to while it was lent"
            self.values[key] = lent
            poison(source)

        return _Late(self._queues[key], act)

    def read(self, key: str, into: Tensor) -> Future[Tensor]:  # noqa: D102
        poison(into)

        def act() -> Tensor:
            if key not in self.values:
                raise StoreError(f"{key!r} was never written", key=key)
            assert is_poison(into), f"{key}: memory was written to while it was lent"
            return into.copy_(self.values[key])

        return _Late(self._queues[key], act)

    def delete(self, key: str) -> None:  # noqa: D102
        while self._queues[key]:
            self._queues[key][-1].exception()
        del self.rooms[key]
        self.values.pop(key, None)

    def sizes(self) -> dict[str, int]:  # noqa: D102
        return dict(self.rooms)

    def close(self) -> None:  # noqa: D102
        late = [key for key, queue in self._queues.items() if queue]
        assert not late, f"{late}: nobody waited for these"
        self.rooms, self.values, self.is_closed = {}, {}, True


@final
@define(eq=False)
class PoisonedGradients:
    """Memory in which a gradient is NaN until somebody has settled; what was lent is NaN then."""

    _deliveries: list[tuple[Tensor, Tensor, bool]] = field(factory=list)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:  # noqa: D102
        return torch.zeros(numel, dtype=dtype)

    def deliver(self, received: Tensor, into: Tensor, *, adds: bool) -> None:  # noqa: D102
        on_their_way = [memory.data_ptr() for _, memory, _ in self._deliveries]
        if not adds and into.numel():
            assert into.data_ptr() not in on_their_way, "what came before was never settled"
            poison(into)
        self._deliveries.append((received, into, adds))

    def flush(self) -> None:  # noqa: D102
        for received, into, adds in self._deliveries:
            assert adds or is_poison(into), "a gradient was written to while it was on its way"
            into.add_(received) if adds else into.copy_(received)
            poison(received)
        self._deliveries.clear()
