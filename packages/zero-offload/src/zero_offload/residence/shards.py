"""Offloaded shards of parameters: in host memory, and on disk."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, final

import torch
from attrs import define, field, frozen
from torch import Tensor

from zero_offload.disk.store import AbstractStore
from zero_offload.errors import BudgetError
from zero_offload.memory.arena import HostArena
from zero_offload.memory.copies import copy_beside
from zero_offload.ranges import ranged

_NUMBERS: Final = itertools.count()
# Most memory of free buffers, in multiples of the largest shard in files.
FREE_SHARDS: Final = 2
# Most shards that are written in the background when `close` returns.
WRITES_BEHIND: Final = 2
# Most copies to a device that are in progress while the next shard is read from disk.
COPIES_BEHIND: Final = 2


@frozen(eq=False)
class ShardRead:
    """An asynchronous read. `wait` blocks until it is done, or makes the current stream wait."""

    wait: Callable[[], object]


@final
@define(eq=False)
class OffloadedShards:
    """Shards by number, in host memory or in files. Local.

    Shards on the host are copied ahead of each use. Shards in files are read ahead into buffers in
    host memory, and written from there in the background.

    Args:
        arena: Allocates shards on the host, and the buffers for shards in files.
        open_store: Returns the store of shards in files; called by `allocate`. The caller closes
            the store. None: all shards are on the host.
        max_host_numel: Most elements of shards that stay on the host although there is a store;
            see `first_that_fit`.
        budget_bytes: Most host memory for these; None: no limit but the process's.
    """

    arena: HostArena
    open_store: Callable[[], AbstractStore] | None = None
    max_host_numel: int = field(default=0, kw_only=True)
    budget_bytes: int | None = field(default=None, kw_only=True)
    # Number -> shard that stays in host memory.
    _host: dict[int, Tensor] = field(factory=dict, init=False)
    # Number -> event of the last copy of such a shard from or to a device; its next use waits.
    _copies: dict[int, Any] = field(factory=dict, init=False)
    # Store of the shards in files; set by `allocate` if there is one.
    _store: AbstractStore = field(init=False)
    # Number -> tensor of the size and dtype of a shard in files, without memory.
    _blank: dict[int, Tensor] = field(factory=dict, init=False)
    # Number -> key of a shard in the store.
    _keys: dict[int, str] = field(factory=dict, init=False)
    # Number -> buffer and read of a shard that is read ahead.
    _ahead: dict[int, tuple[Tensor, Future[Any]]] = field(factory=dict, init=False)
    # Number -> buffer of a shard in files between `open` and `close`.
    _open: dict[int, Tensor] = field(factory=dict, init=False)
    # Number, buffer and write of closed shards whose write may be in progress, the oldest first.
    _behind: deque[tuple[int, Tensor, Future[None]]] = field(factory=deque, init=False)
    # Number -> values of a shard that could not be written; the store has older ones.
    _unkept: dict[int, Tensor] = field(factory=dict, init=False)
    # Buffers that are being copied to a device, and the event after each copy, the oldest first.
    _returning: deque[tuple[Tensor, Any]] = field(factory=deque, init=False)
    # Bytes -> free buffers of that size.
    _free: dict[int, list[Tensor]] = field(factory=dict, init=False)
    # Bytes of all buffers, free or in use.
    _passing_bytes: int = field(default=0, init=False)
    _streams: dict[torch.device, Any] = field(factory=dict, init=False)

    def allocate(self, shards: Mapping[int, Tensor]) -> None:
        """Allocate memory and files for shards, so that a lack of space shows before training.

        Args:
            shards: 1-D tensors of the shards' sizes and dtypes, by number; they need no memory.

        Raises:
            BudgetError: The host does not have the memory.
            StoreError: The disk does not have the space, or there is no such folder.
        """
        on_host = dict(shards)
        if self.open_store is not None:
            on_host = first_that_fit(shards, self.max_host_numel)
            needed = sum(shard.nbytes for shard in on_host.values())
            if self.budget_bytes is not None and needed > self.budget_bytes:
                raise BudgetError(
                    f"parameters of {needed:,} bytes would be kept on the host by max_host_numel="
                    f"{self.max_host_numel}, and budget_bytes is {self.budget_bytes:,}; lower the "
                    "first, or raise the second",
                    nbytes=needed,
                )
            self._store = self.open_store()
        for index, shard in on_host.items():
            memory = self.arena.allocate(shard.numel(), dtype=shard.dtype, name="parameters")
            self._host[index] = memory
        self._blank = {index: shard for index, shard in shards.items() if index not in on_host}
        if self._blank:
            # Several instances may share a store, so each numbers its keys.
            name = f"parameters-{next(_NUMBERS)}"
            keys = {index: f"{name}.{index}" for index in self._blank}
            self._store.allocate({keys[i]: shard.nbytes for i, shard in self._blank.items()})
            self._keys = keys

    @ranged("swap_in", "arena.name")
    def read(self, index: int, into: Tensor) -> ShardRead:
        """Begin to copy a shard into `into`, which must not be used until the read is done."""
        if index in self._host and not into.is_cpu:
            _let_wait(self._copies.get(index), into.device)
            event = self._copies[index] = copy_beside(self._host[index], into, self._streams)
            return ShardRead(partial(_let_wait, event, into.device))
        memory = self._unkept.get(index) if index in self._blank else self.open(index, reads=True)
        if memory is not None:
            into.copy_(memory)
            # The copy has been made, so there is nothing to wait for.
            return ShardRead(lambda: None)
        if index not in self._ahead and into.is_cpu:
            return ShardRead(self._store.read(self._keys[index], into).result)
        self._read_ahead(index)
        memory, future = self._ahead.pop(index)
        return ShardRead(partial(self._pass_on, memory, future, into))

    @ranged("swap_in", "arena.name")
    def expect(self, indices: Sequence[int]) -> None:
        """Begin to read shards from disk into host memory; `read` takes them in this order.

        Other shards that were read ahead are dropped.
        """
        nearer = self._host.keys() | self._open.keys() | self._unkept.keys()
        wanted = [index for index in indices if index not in nearer]
        for index in self._ahead.keys() - set(wanted):
            self._forget(index)
        for index in wanted:
            self._read_ahead(index)

    def write(self, index: int, values: Tensor) -> None:
        """Begin to write a shard's values. The host does not wait for a copy from a device to it.

        Args:
            index: Number of the shard.
            values: 1-D, of its size, of any dtype. They are read on the current stream.
        """
        if index in self._blank or values.is_cpu:
            self.open(index, reads=False).copy_(values)
            self.close(index)
            return
        _let_wait(self._copies.get(index), values.device)
        memory = self._host[index]
        # Convert on the device: the copy then has fewer bytes, and torch does not block for it.
        memory.copy_(values.to(memory.dtype), non_blocking=True)
        self._copies[index] = torch.accelerator.current_stream(values.device).record_event()

    def open(self, index: int, *, reads: bool) -> Tensor:
        """Return host memory of a shard, to be changed until `close`. Blocks while it is in use.

        With `reads` it contains the shard's values. Else its contents are undefined, and the caller
        writes all of it.
        """
        if index in self._host:
            if index in self._copies:
                self._copies.pop(index).synchronize()
            return self._host[index]
        self._forget(index)
        memory = self._unkept.pop(index, None)
        if memory is None:
            memory = self._take(index)
            try:
                if reads:
                    self._store.read(self._keys[index], memory).result()
            except BaseException:
                self._give_back(memory)
                raise
        self._open[index] = memory
        return memory

    @ranged("swap_out", "arena.name")
    def close(self, index: int) -> None:
        """Begin to write back an opened shard. Reads that begin later see the new values."""
        if index in self._host:
            return
        memory = self._open.pop(index)
        self._behind.append((index, memory, self._store.write(self._keys[index], memory)))
        while len(self._behind) > WRITES_BEHIND:
            self._keep_oldest()

    @ranged("swap_out wait", "arena.name")
    def flush(self) -> None:
        """Block until all closed shards are written.

        Raises:
            StoreError: The disk refused a shard, whose values stay in host memory.
        """
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
        """Bytes of host memory in use: shards on the host, and buffers for those in files."""
        return sum(shard.nbytes for shard in self._host.values()) + self._passing_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the shards in files."""
        return sum(shard.nbytes for shard in self._blank.values())

    def another(self) -> OffloadedShards:
        """Return an empty instance with the same arena and store; it must end before this one."""
        return OffloadedShards(self.arena, self.open_store)

    def end(self) -> None:
        """Release everything. Again: nothing happens."""
        for index in list(self._ahead):
            self._forget(index)
        while self._behind:
            self._behind.popleft()[2].exception()
        # The arena waits for copies before it releases the memory.
        self._host, self._copies = {}, {}
        self._returning.clear()
        self._free, self._unkept, self._passing_bytes = {}, {}, 0
        for key in self._keys.values():
            self._store.delete(key)
        self._blank, self._keys = {}, {}

    def _read_ahead(self, index: int) -> None:
        if index not in self._ahead:
            memory = self._take(index)
            self._ahead[index] = (memory, self._store.read(self._keys[index], memory))

    def _forget(self, index: int) -> None:
        if index in self._ahead:
            memory, future = self._ahead.pop(index)
            # Wait for the end of the read. The values are not needed, so an error does not matter.
            future.exception()
            self._give_back(memory)

    def _pass_on(self, memory: Tensor, future: Future[Any], into: Tensor) -> None:
        """Wait for a read into host memory, and copy the shard from there to `into`."""
        try:
            future.result()
        except BaseException:
            self._give_back(memory)
            raise
        if into.is_cpu:
            into.copy_(memory)
            self._give_back(memory)
            return
        event = copy_beside(memory, into, self._streams)
        self._returning.append((memory, event))
        _let_wait(event, into.device)

    def _give_back(self, memory: Tensor) -> None:
        self._free.setdefault(memory.nbytes, []).append(memory)

    def _take(self, index: int) -> Tensor:
        blank = self._blank[index]
        # The host may be many units ahead of the device. Wait for the oldest copy then: otherwise
        # all of a model's shards could be in host memory, each for a copy that has not begun.
        while self._returning:
            memory, event = self._returning[0]
            if not event.query():
                if len(self._returning) <= COPIES_BEHIND:
                    break
                event.synchronize()
            self._returning.popleft()
            self._give_back(memory)
        free = self._free.get(blank.nbytes)
        if free:
            return free.pop().view(blank.dtype)
        self._release_free()
        memory = self.arena.allocate(
            blank.numel(), dtype=blank.dtype, name="parameters passing through"
        )
        self._passing_bytes += memory.nbytes
        return memory

    def _release_free(self) -> None:
        """Release free buffers if they exceed `FREE_SHARDS` times the largest shard in files.

        Else a model whose units all differ in size would end with all its shards in host memory.
        """
        free = sum(memory.nbytes for some in self._free.values() for memory in some)
        if free > FREE_SHARDS * max(shard.nbytes for shard in self._blank.values()):
            self._free.clear()
            self._passing_bytes -= free

    def _keep_oldest(self) -> None:
        index, memory, future = self._behind.popleft()
        try:
            future.result()
        except BaseException:
            if any(index == later for later, _, _ in self._behind):
                # A later write of the same shard has newer values.
                self._give_back(memory)
            else:
                # Keep the values. They are written when the shard is next changed.
                self._unkept[index] = memory
            raise
        self._give_back(memory)


def first_that_fit(shards: Mapping[int, Tensor], max_host_numel: int) -> dict[int, Tensor]:
    """Return the shards that stay on the host while the others are on disk. Arithmetic only.

    Each shard, in order, that fits into the elements that are left of `max_host_numel`.
    """
    budget, on_host = max_host_numel, {}
    for index, shard in shards.items():
        if shard.numel() <= budget:
            on_host[index] = shard
            budget -= shard.numel()
    return on_host


def _let_wait(event: Any, device: torch.device) -> None:
    """Make the current stream wait for an event, if there is one."""
    if event is not None:
        torch.accelerator.current_stream(device).wait_event(event)
