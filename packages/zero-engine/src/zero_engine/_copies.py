"""Host memory that holds what a save in the background writes, and how values get there."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from typing import Final

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor
from zero_offload import HostArena

from ._errors import FileError
from ._part_writer import Given, GivenBatch
from ._writing import Writing

_ALIGN_BYTES: Final = 64  # of each copy in their memory


@frozen(eq=False)
class _Watched:
    """A tensor to which nobody may write while its values are copied."""

    name: str
    tensor: Tensor
    version: int


@define(eq=False)
class Copying:
    """Copies that are taken on another thread while training reads the same values."""

    _pending: list[tuple[Tensor, Tensor]] = field(factory=list, init=False)  # copy and source
    _watched: list[_Watched] = field(factory=list, init=False)
    _is_over: Event = field(factory=Event, init=False)
    _device: torch.device | None = field(default=None, init=False)
    _is_ready: torch.cuda.Event | None = field(default=None, init=False)  # on that device

    def watch(self, name: str, tensor: Tensor) -> None:
        """Fail if somebody writes to this before all is copied."""
        self._watched.append(_Watched(name, tensor, tensor._version))

    def add(self, copy: Tensor, source: Tensor) -> None:
        """Have this copied."""
        self._pending.append((copy, source))

    def follow(self, device: torch.device) -> None:
        """Have it done after all that has been launched on a device by now, and after that only."""
        self._device, self._is_ready = device, torch.cuda.Event()
        self._is_ready.record(torch.cuda.current_stream(device))

    def run(self) -> None:
        """On the thread.

        Raises:
            FileError: Somebody has written to a value meanwhile.
        """
        try:
            self._copy()
            for each in self._watched:
                if each.tensor._version != each.version:
                    raise FileError(
                        f"{each.name}: was written to while it was copied. With overlap=True what "
                        "trains must stay as it is until the optimizer's next step; leave that "
                        "out, or write later"
                    )
        finally:
            self._pending, self._watched = [], []
            self._is_over.set()

    def wait(self) -> None:
        """Until the values may change."""
        self._is_over.wait()

    def _copy(self) -> None:
        if self._is_ready is not None:
            stream = torch.cuda.Stream(self._device)
            with torch.cuda.stream(stream):
                stream.wait_event(self._is_ready)
                for copy, source in self._pending:
                    if source.is_cuda:
                        copy.copy_(source, non_blocking=True)
            stream.synchronize()
        for copy, source in self._pending:
            if not source.is_cuda:  # one core: torch would take all of those that training has
                np.copyto(copy.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())


@define(eq=False)
class Copies:
    """Host memory that holds what is being written.

    It is kept: to fault its pages in anew for every checkpoint takes longer than to fill them.
    """

    _arena: HostArena = field(factory=lambda: HostArena("copies of a checkpoint"), init=False)
    _memory: dict[Given, Tensor] = field(factory=dict, init=False)

    def take(self, writing: Writing, copying: Copying | None) -> int:
        """Let it be written from copies; returns their bytes.

        Args:
            writing: Whose batches become copies.
            copying: Is given what may be copied later; without one, all is copied now.
        """
        of_frozen, of_others = writing.frozen_batches, writing.batches
        runs = dict.fromkeys(run for batch in (*of_frozen, *of_others) for run in batch.runs)
        if self._memory.keys() != runs.keys():
            self._memory = {}  # before there is more
            self._memory = self._room_for(list(runs))
        writing.frozen_batches = [self._copied(batch, copying) for batch in of_frozen]
        writing.batches = [self._copied(batch, copying) for batch in of_others]
        device = writing.group.device
        if device.type == "cuda" and copying is not None:
            copying.follow(device)
        elif device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return sum(copy.nbytes for copy in self._memory.values())

    def _room_for(self, runs: Sequence[Given]) -> dict[Given, Tensor]:
        """At once: a mapping for each of thousands would be one too many for the kernel."""
        sizes = [run.planned().num_bytes for run in runs]
        aligned = [-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes]
        parts = self._arena.allocate(sum(aligned)).split(aligned)
        return {
            run: part[:size].view(run.dtype)
            for run, part, size in zip(runs, parts, sizes, strict=True)
        }

    def _copied(self, batch: GivenBatch, copying: Copying | None) -> GivenBatch:
        values = []
        for run, value in zip(batch.runs, batch.read(), strict=True):
            copy, flat = self._memory[run], value.detach().view(-1)
            if (flat.dtype, flat.numel()) != (copy.dtype, copy.numel()):
                values.append(flat)  # for the writer to refuse
                continue
            if copying is not None and batch.is_resident:
                copying.watch(run.key, flat)
                copying.add(copy, flat)
            else:
                copy.copy_(flat, non_blocking=True)
            values.append(copy)

        def read() -> list[Tensor]:
            return values

        return GivenBatch(batch.runs, read)
