"""Backups of training state between phases: in one piece of host memory, or in files."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Thread
from typing import Any, final

import torch
from attrs import define, field
from torch import Tensor

from zero_offload.disk.store import AbstractStore
from zero_offload.memory.arena import HostArena
from zero_offload.state.subgroups import align_up


@final
@define(eq=False)
class HostBackup:
    """Copies of bytes in one piece of host memory. Tensors are 1-D, of any device.

    Args:
        arena: Allocates the memory.
    """

    arena: HostArena
    _values: dict[str, Tensor] = field(factory=dict, init=False)
    # Event of the last asynchronous copy; its memory must not be freed before.
    _last_copy: Any = field(default=None, init=False)

    def allocate(self, sizes: Mapping[str, int]) -> None:
        """Allocate memory for values by key -> bytes, or raise BudgetError. Called once."""
        aligned = [align_up(size) for size in sizes.values()]
        parts = self.arena.allocate(sum(aligned)).split(aligned)
        self._values = {
            key: part[:size] for (key, size), part in zip(sizes.items(), parts, strict=True)
        }

    def write(self, key: str, source: Tensor, *, non_blocking: bool) -> None:
        """Copy `source`, whose memory may be freed right afterwards."""
        self._copy(self._values[key], source, non_blocking=non_blocking)
        # The source may have been allocated on another stream, which must not reuse it too early.
        if non_blocking and not source.is_cpu:
            source.record_stream(torch.accelerator.current_stream(source.device))

    def read(self, key: str, into: Tensor, *, non_blocking: bool) -> None:
        """Copy what was written into `into`."""
        self._copy(into, self._values[key], non_blocking=non_blocking)

    def close(self) -> None:
        """Release all values. Does not block: the memory is freed after the last copy."""
        values, self._values = self._values, {}
        if self._last_copy is not None and not self._last_copy.query():
            # To release the memory blocks until the copies have ended, so a thread does it.
            Thread(target=values.clear, daemon=True).start()

    def _copy(self, into: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        into.copy_(source, non_blocking=non_blocking)
        device = source.device if into.is_cpu else into.device
        if non_blocking and device.type != "cpu":
            self._last_copy = torch.Event(device)
            self._last_copy.record(torch.accelerator.current_stream(device))


@final
@define(eq=False)
class DiskBackup:
    """Copies of bytes in a store of files, which `close` closes. Every call blocks."""

    store: AbstractStore

    def allocate(self, sizes: Mapping[str, int]) -> None:
        """Allocate space on disk for values by key -> bytes, or raise StoreError."""
        self.store.allocate(sizes)

    def write(self, key: str, source: Tensor, *, non_blocking: bool) -> None:
        """Copy `source` to the store; a tensor on a device goes through host memory."""
        self.store.write(key, source.cpu()).result()

    def read(self, key: str, into: Tensor, *, non_blocking: bool) -> None:
        """Copy what was written into `into`."""
        on_host = into if into.is_cpu else torch.empty_like(into, device="cpu")
        self.store.read(key, on_host).result()
        if on_host is not into:
            into.copy_(on_host)

    def close(self) -> None:
        """Close the store."""
        self.store.close()
