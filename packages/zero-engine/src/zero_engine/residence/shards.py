"""Where shards of parameters rest outside the device: host memory, and disk."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, final

import torch
from attrs import define, field, frozen
from torch import Tensor
from zero_offload import BudgetError, DiskSettings, DiskStore, HostArena
from zero_partition.seams import ShardSize, TensorHome

from zero_engine.errors import ConfigError
from zero_engine.offload import Offload


@define(eq=False)
class Disk:
    """The store, opened when room is first taken in it, closed when nobody uses it any more.

    Not before: a folder that is missing on one rank is then known to all.
    """

    offload: Offload
    _store: DiskStore | None = field(default=None, init=False)
    _num_users: int = field(default=0, init=False)

    def open(self) -> DiskStore:
        """The store, for one user more.

        Raises:
            zero_offload.StoreError: There is no such folder, or it cannot be written to.
        """
        if self._store is None:
            if self.offload.path is None:
                raise ConfigError("Offload.path: expected a folder on the disk to use, got None")
            self._store = DiskStore(self.offload.path, self.offload.disk or DiskSettings())
        self._num_users += 1
        return self._store

    def close(self) -> None:
        """One user has ended."""
        self._num_users -= 1
        if not self._num_users and self._store is not None:
            self._store.close()
            self._store = None


# ---- Where shards of parameters rest outside the device: host memory, and disk ----


_NUMBERS: Final = itertools.count()
FREE_SHARDS: Final = 2  # of the largest size, as memory that waits for a shard of its size
WRITES_BEHIND: Final = 2  # shards that are written while the next is made


@frozen(eq=False)
class _Done:
    """Nothing is left to wait for."""

    def wait(self) -> None:
        return


@frozen(eq=False)
class _OnDevice:
    """A copy on a stream of its own."""

    event: Any
    stream: Any

    def wait(self) -> None:
        """Let the current stream wait."""
        torch.cuda.current_stream(self.stream.device).wait_event(self.event)


@final
@define(eq=False)
class HostHome(TensorHome):
    """In page-locked host memory: copied to the device ahead of each gather.

    Args:
        arena: Whose memory.
    """

    arena: HostArena
    _shards: dict[int, Tensor] = field(factory=dict, init=False)
    _copies: dict[int, _OnDevice] = field(factory=dict, init=False)  # the last of each shard
    _streams: dict[torch.device, Any] = field(factory=dict, init=False)

    def allocate(self, sizes: Mapping[int, ShardSize]) -> None:
        """See `TensorHome.allocate`."""
        for index, size in sizes.items():
            shard = self.arena.allocate(size.numel, dtype=size.dtype, name="parameters")
            self._shards[index] = shard

    def read(self, index: int, into: Tensor) -> _Done | _OnDevice:
        """See `TensorHome.read`."""
        shard = self._shards[index]
        if into.is_cpu:
            into.copy_(shard)
            return _Done()
        self._copies[index] = copy_ahead(shard, into, self._streams)
        return self._copies[index]

    def expect(self, indices: Sequence[int]) -> None:
        """See `TensorHome.expect`: there is nothing to bring nearer."""

    def open(self, index: int, *, reads: bool) -> Tensor:
        """See `TensorHome.open`."""
        if index in self._copies:
            self._copies.pop(index).event.synchronize()
        return self._shards[index]

    def close(self, index: int) -> None:
        """See `TensorHome.close`."""

    def settle(self) -> None:
        """See `TensorHome.settle`."""

    @property
    def host_bytes(self) -> int:
        """See `TensorHome.host_bytes`."""
        return sum(shard.nbytes for shard in self._shards.values())

    @property
    def disk_bytes(self) -> int:
        """See `TensorHome.disk_bytes`."""
        return 0

    def another(self) -> HostHome:
        """See `TensorHome.another`."""
        return HostHome(self.arena)

    def end(self) -> None:
        """See `TensorHome.end`."""
        for copy in self._copies.values():
            copy.event.synchronize()
        self._shards, self._copies = {}, {}


@final
@define(eq=False)
class DiskHome(TensorHome):
    """In files: read ahead into host memory, and written behind from there.

    Args:
        disk: Where to.
        arena: Whose memory shards pass through.
        max_host_numel: Elements of shards, the first ones, that rest in host memory all the same.
        budget_bytes: Most host memory for those; None: no limit but the process's.
    """

    disk: Disk
    arena: HostArena
    max_host_numel: int = field(default=0, kw_only=True)
    budget_bytes: int | None = field(default=None, kw_only=True)
    _store: DiskStore | None = field(default=None, init=False)
    _host: HostHome = field(init=False)
    _on_host: set[int] = field(factory=set, init=False)
    _sizes: dict[int, ShardSize] = field(factory=dict, init=False)  # of those on the disk
    _keys: dict[int, str] = field(factory=dict, init=False)  # theirs in the store
    _ahead: dict[int, tuple[Tensor, Future[Any]]] = field(factory=dict, init=False)
    _open: dict[int, Tensor] = field(factory=dict, init=False)
    _behind: deque[tuple[int, Tensor, Future[None]]] = field(factory=deque, init=False)
    _unkept: dict[int, Tensor] = field(factory=dict, init=False)  # what the disk did not take
    _returning: deque[tuple[Tensor, _OnDevice]] = field(factory=deque, init=False)
    _free: dict[int, list[Tensor]] = field(factory=dict, init=False)  # by size in bytes
    _passing_bytes: int = field(default=0, init=False)
    _streams: dict[torch.device, Any] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._host = HostHome(self.arena)

    def allocate(self, sizes: Mapping[int, ShardSize]) -> None:
        """See `TensorHome.allocate`."""
        on_host = first_that_fit(sizes, self.max_host_numel)
        needed = sum(size.num_bytes for size in on_host.values())
        if self.budget_bytes is not None and needed > self.budget_bytes:
            raise BudgetError(
                f"parameters of {needed:,} bytes were to rest on the host by max_host_numel="
                f"{self.max_host_numel}, and budget_bytes is {self.budget_bytes:,}; lower the "
                "first, or raise the second",
                nbytes=needed,
            )
        self._store = self.disk.open()
        self._host.allocate(on_host)
        self._on_host = set(on_host)
        self._sizes = {index: size for index, size in sizes.items() if index not in on_host}
        name = f"parameters-{next(_NUMBERS)}"  # several homes may share a store
        keys = {index: f"{name}.{index}" for index in self._sizes}
        self._opened.allocate({keys[index]: size.num_bytes for index, size in self._sizes.items()})
        self._keys = keys

    def read(self, index: int, into: Tensor) -> Any:
        """See `TensorHome.read`."""
        if index in self._on_host:
            return self._host.read(index, into)
        if index in self._unkept:
            into.copy_(self._unkept[index])
            return _Done()
        if index not in self._ahead and into.is_cpu:
            return _Reading(self._opened.read(self._keys[index], into))
        self._begin(index)
        memory, future = self._ahead.pop(index)
        return _Passing(self, memory, future, into)

    def expect(self, indices: Sequence[int]) -> None:
        """See `TensorHome.expect`."""
        nearer = self._on_host | self._open.keys() | self._unkept.keys()
        wanted = [index for index in indices if index not in nearer]
        for index in self._ahead.keys() - set(wanted):
            self._forget(index)
        for index in wanted:
            self._begin(index)

    def open(self, index: int, *, reads: bool) -> Tensor:
        """See `TensorHome.open`."""
        if index in self._on_host:
            return self._host.open(index, reads=reads)
        self._forget(index)
        memory = self._unkept.pop(index, None)
        if memory is None:
            memory = self._take(index)
            if reads:
                self._fill(index, memory)
        self._open[index] = memory
        return memory

    def close(self, index: int) -> None:
        """See `TensorHome.close`."""
        if index in self._on_host:
            return
        memory = self._open.pop(index)
        self._behind.append((index, memory, self._opened.write(self._keys[index], memory)))
        while len(self._behind) > WRITES_BEHIND:
            self._keep_oldest()

    def settle(self) -> None:
        """See `TensorHome.settle`."""
        errors = []
        while self._behind:
            try:
                self._keep_oldest()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    @property
    def host_bytes(self) -> int:
        """See `TensorHome.host_bytes`."""
        return self._host.host_bytes + self._passing_bytes

    @property
    def disk_bytes(self) -> int:
        """See `TensorHome.disk_bytes`."""
        return sum(size.num_bytes for size in self._sizes.values())

    def another(self) -> DiskHome:
        """See `TensorHome.another`."""
        return DiskHome(self.disk, self.arena)

    def end(self) -> None:
        """See `TensorHome.end`."""
        for index in list(self._ahead):
            self._forget(index)
        while self._behind:
            self._behind.popleft()[2].exception()
        for _, copy in self._returning:
            copy.event.synchronize()
        self._returning.clear()
        self._free, self._unkept, self._passing_bytes = {}, {}, 0
        self._host.end()
        if self._store is not None:
            for key in self._keys.values():
                self._store.delete(key)
            self.disk.close()
        self._sizes, self._keys, self._store = {}, {}, None

    @property
    def _opened(self) -> DiskStore:
        assert self._store is not None, "allocate() comes first, and end() last"
        return self._store

    def give_back(self, memory: Tensor, copy: _OnDevice | None) -> None:
        """Memory that a shard has passed through, or will have when it is copied from there."""
        if copy is not None:
            self._returning.append((memory, copy))
            return
        self._free.setdefault(memory.nbytes, []).append(memory)

    def copy(self, memory: Tensor, into: Tensor) -> _OnDevice | None:
        """Begin to copy from there; None: it is done."""
        if into.is_cpu:
            into.copy_(memory)
            return None
        return copy_ahead(memory, into, self._streams)

    def _begin(self, index: int) -> None:
        if index not in self._ahead:
            memory = self._take(index)
            self._ahead[index] = (memory, self._opened.read(self._keys[index], memory))

    def _fill(self, index: int, memory: Tensor) -> None:
        try:
            self._opened.read(self._keys[index], memory).result()
        except BaseException:
            self.give_back(memory, None)
            raise

    def _forget(self, index: int) -> None:
        if index in self._ahead:
            memory, future = self._ahead.pop(index)
            future.exception()  # which nobody needs
            self.give_back(memory, None)

    def _take(self, index: int) -> Tensor:
        size = self._sizes[index]
        while self._returning and self._returning[0][1].event.query():
            self.give_back(self._returning.popleft()[0], None)
        free = self._free.get(size.num_bytes)
        if free:
            return free.pop().view(size.dtype)
        self._release_free()
        memory = self.arena.allocate(
            size.numel, dtype=size.dtype, name="parameters passing through"
        )
        self._passing_bytes += memory.nbytes
        return memory

    def _release_free(self) -> None:
        """Memory of other sizes is kept for shards to come only while it is little.

        Else a model of units that all differ would end with all of its shards in host memory.
        """
        free = sum(memory.nbytes for some in self._free.values() for memory in some)
        if free > FREE_SHARDS * max(size.num_bytes for size in self._sizes.values()):
            self._free.clear()
            self._passing_bytes -= free

    def _keep_oldest(self) -> None:
        index, memory, future = self._behind.popleft()
        try:
            future.result()
        except BaseException:
            self._unkept[index] = memory  # nothing is lost: it is written when it is next changed
            raise
        self.give_back(memory, None)


def first_that_fit(sizes: Mapping[int, ShardSize], max_host_numel: int) -> dict[int, ShardSize]:
    """Shards that rest on the host although the others rest on disk. Arithmetic only."""
    room, on_host = max_host_numel, {}
    for index, size in sizes.items():
        if size.numel <= room:
            on_host[index] = size
            room -= size.numel
    return on_host


@frozen(eq=False)
class _Reading:
    """A read into the very place."""

    future: Future[Any]

    def wait(self) -> None:
        self.future.result()


@frozen(eq=False)
class _Passing:
    """A read into host memory, and a copy from there."""

    home: DiskHome
    memory: Tensor
    future: Future[Any]
    into: Tensor

    def wait(self) -> None:
        try:
            self.future.result()
        except BaseException:
            self.home.give_back(self.memory, None)
            raise
        copy = self.home.copy(self.memory, self.into)
        self.home.give_back(self.memory, copy)
        if copy is not None:
            copy.wait()


def copy_ahead(source: Tensor, into: Tensor, streams: dict[torch.device, Any]) -> _OnDevice:
    """Begin to copy to a device, on a stream for such copies. Nobody may use `into` before."""
    if into.device not in streams:
        streams[into.device] = torch.cuda.Stream(into.device)
    stream = streams[into.device]
    stream.wait_stream(torch.cuda.current_stream(into.device))  # which has used `into` before
    with torch.cuda.stream(stream):
        into.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
    return _OnDevice(event, stream)
