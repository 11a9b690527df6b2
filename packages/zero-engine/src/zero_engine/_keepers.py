"""Where parked training state is: zero_offload's memory and files as zero_partition's keepers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from threading import Thread
from typing import Final, final

import torch
from attrs import define, field
from torch import Tensor
from zero_offload import DiskStore, HostArena
from zero_partition import AbstractKeeper

_ALIGN_BYTES: Final = 64


@final
@define(eq=False)
class HostKeeper(AbstractKeeper):
    """Keeps bytes in one piece of host memory, which goes when all is back."""

    pin: bool
    _places: dict[str, slice] = field(factory=dict, init=False)
    _memory: Tensor | None = field(default=None, init=False)
    _last_copy: torch.cuda.Event | None = field(default=None, init=False)  # nobody waited for it

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """See `AbstractKeeper.reserve`."""
        rooms = [-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes.values()]
        starts = accumulate(rooms, initial=0)
        self._places = {
            key: slice(start, start + size)
            for (key, size), start in zip(sizes.items(), starts, strict=False)
        }
        self._memory = HostArena("parked training state", is_pinned=self.pin).allocate(sum(rooms))

    def keep(self, key: str, source: Tensor, *, waits: bool) -> None:
        """See `AbstractKeeper.keep`."""
        self._copy(self._place(key), source, waits=waits)
        if not waits and source.is_cuda:  # its memory may be another stream's
            source.record_stream(torch.cuda.current_stream(source.device))

    def give_back(self, key: str, into: Tensor, *, waits: bool) -> None:
        """See `AbstractKeeper.give_back`."""
        self._copy(into, self._place(key), waits=waits)

    def close(self) -> None:
        """See `AbstractKeeper.close`. Waits for no copy: the memory goes after the last."""
        memory, self._memory = self._memory, None
        if self._last_copy is not None and not self._last_copy.query():
            Thread(target=_let_go, args=(memory, self._last_copy), daemon=True).start()

    def _place(self, key: str) -> Tensor:
        assert self._memory is not None, "reserve() comes first"
        return self._memory[self._places[key]]

    def _copy(self, into: Tensor, source: Tensor, *, waits: bool) -> None:
        into.copy_(source, non_blocking=not waits)
        device = into.device if into.is_cuda else source.device
        if not waits and device.type == "cuda":
            self._last_copy = torch.cuda.Event()
            self._last_copy.record(torch.cuda.current_stream(device))


def _let_go(memory: Tensor, last_copy: torch.cuda.Event) -> None:
    last_copy.synchronize()
    del memory


@final
@define(eq=False)
class DiskKeeper(AbstractKeeper):
    """Keeps bytes in files. Copies are done when it returns; a device's go through the host."""

    store: DiskStore

    @classmethod
    def below(cls, path: Path) -> DiskKeeper:
        """One with a private folder in this one."""
        return cls(DiskStore(path))

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """See `AbstractKeeper.reserve`."""
        self.store.allocate(sizes)

    def keep(self, key: str, source: Tensor, *, waits: bool) -> None:
        """See `AbstractKeeper.keep`."""
        self.store.write(key, source.cpu()).result()

    def give_back(self, key: str, into: Tensor, *, waits: bool) -> None:
        """See `AbstractKeeper.give_back`."""
        on_host = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
        self.store.read(key, on_host).result()
        if on_host is not into:
            into.copy_(on_host)

    def close(self) -> None:
        """See `AbstractKeeper.close`."""
        self.store.close()
