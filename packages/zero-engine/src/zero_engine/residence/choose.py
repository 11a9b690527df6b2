"""From what a configuration says of offload to who keeps what."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, final

import torch
from attrs import define, field, frozen
from torch import Tensor
from zero_offload import HostArena
from zero_partition.seams import GradientHome, RestPlan

from zero_engine.offload import Offload

from .delayed import DelayedUpdater, HeldBack
from .offload import OffloadedUpdater
from .shards import Disk, DiskHome, HostHome

_STAGED: Final = 2  # gradients to be added that are on their way at a time


@frozen(eq=False)
class _Delivery:
    """A copy under way. `adds_to` is where it is to be added once it is here."""

    event: Any
    source: Tensor
    copy: Tensor
    adds_to: Tensor | None


@final
@define(eq=False)
class HostGradients(GradientHome):
    """In page-locked memory, copied on a stream of its own.

    Args:
        arena: Whose memory.
    """

    arena: HostArena
    _under_way: deque[_Delivery] = field(factory=deque, init=False)
    _staging: dict[int, list[Tensor]] = field(factory=dict, init=False)  # free, by size in bytes
    _stream: Any = field(default=None, init=False)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `GradientHome.allocate`."""
        return self.arena.allocate(numel, dtype=dtype, name="gradients")

    def deliver(self, received: Tensor, into: Tensor, *, adds: bool) -> None:
        """See `GradientHome.deliver`."""
        if received.is_cpu:
            into.add_(received) if adds else into.copy_(received)
            return
        while adds and sum(each.adds_to is not None for each in self._under_way) >= _STAGED:
            self._land()
        copy = self._take_staging(received) if adds else into
        event = self._copy(received, copy)
        self._under_way.append(_Delivery(event, received, copy, into if adds else None))

    def settle(self) -> None:
        """See `GradientHome.settle`."""
        while self._under_way:
            self._land()

    def _copy(self, received: Tensor, copy: Tensor) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(received.device)
        self._stream.wait_stream(torch.cuda.current_stream(received.device))
        with torch.cuda.stream(self._stream):
            copy.copy_(received, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def _land(self) -> None:
        delivery = self._under_way.popleft()
        delivery.event.synchronize()
        if delivery.adds_to is not None:
            delivery.adds_to.add_(delivery.copy)
            self._staging.setdefault(delivery.copy.nbytes, []).append(delivery.copy)

    def _take_staging(self, like: Tensor) -> Tensor:
        free = self._staging.get(like.nbytes)
        if free:
            return free.pop().view(like.dtype)
        return self.arena.allocate(like.numel(), dtype=like.dtype, name="gradients to be added")


# ---- From what a configuration says of offload to who keeps what ----


@frozen(kw_only=True)
class Elsewhere:
    """Who keeps what outside the device, for `zero_partition.partition`. None: nobody does."""

    home: HostHome | DiskHome | None = None
    offload: OffloadedUpdater | DelayedUpdater | None = None
    gradient_home: HostGradients | None = None

    @classmethod
    def of(cls, offload: Offload | None, device: torch.device) -> Elsewhere:
        """As it was configured; nothing is allocated or opened yet. Local.

        Where the device is the CPU, what rests on the host rests on the device. Gradients wait on
        the host where all of the optimizer's state is stepped there.
        """
        if offload is None:
            return cls()
        disk, home, where = Disk(offload), None, rests_of(offload, device)
        if offload.params == "disk":
            home = DiskHome(
                disk,
                HostArena("parameters", is_pinned=offload.pin),
                max_host_numel=offload.max_host_numel,
                budget_bytes=offload.budget_bytes,
            )
        elif where.params:
            home = HostHome(HostArena("parameters", is_pinned=offload.pin))
        if not where.state:
            return cls(home=home)
        room = HeldBack(HostArena("delayed update", is_pinned=offload.pin), grads_leave=where.grads)
        inner = OffloadedUpdater(
            offload,
            disk if offload.optimizer == "disk" else None,
            lambda: room.host_bytes + (0 if home is None else home.host_bytes),
        )
        stepped = DelayedUpdater(inner, room) if where.is_delayed else inner
        if not where.grads:
            return cls(home=home, offload=stepped)
        gradients = HostGradients(HostArena("gradients", is_pinned=offload.pin))
        return cls(home=home, offload=stepped, gradient_home=gradients)

    def end(self) -> None:
        """Release what was taken."""
        if self.home is not None:
            self.home.end()
        if self.offload is not None:
            self.offload.end()


def rests_of(offload: Offload | None, device: torch.device) -> RestPlan:
    """Which kinds rest outside the device. Arithmetic only."""
    is_cpu = device.type == "cpu"
    if offload is None:
        return RestPlan(host_is_device=is_cpu)
    params = offload.params == "disk" or (offload.params == "host" and not is_cpu)
    state = offload.optimizer != "device" and offload.fraction > 0
    return RestPlan(
        params=params,
        state=state,
        grads=state and not is_cpu and offload.fraction == 1,
        is_delayed=state and offload.delayed_update,
        host_is_device=is_cpu,
    )
