"""From what a configuration says of offload to who keeps what."""

from __future__ import annotations

import torch
from attrs import frozen
from zero_offload import HostArena
from zero_partition import RestPlan

from ._delayed_updater import DelayedUpdater
from ._disk import Disk
from ._held_back import HeldBack
from ._host_gradients import HostGradients
from ._offload import Offload
from ._shard_homes import DiskHome, HostHome
from ._shard_updater import OffloadedUpdater


@frozen(kw_only=True)
class Elsewhere:
    """Who keeps what outside the device, for `zero_partition.partition`. None: nobody does."""

    home: HostHome | DiskHome | None = None
    updater: OffloadedUpdater | DelayedUpdater | None = None
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
        updater = DelayedUpdater(inner, room) if where.is_delayed else inner
        if not where.grads:
            return cls(home=home, updater=updater)
        gradients = HostGradients(HostArena("gradients", is_pinned=offload.pin))
        return cls(home=home, updater=updater, gradient_home=gradients)

    def end(self) -> None:
        """Release what was taken."""
        if self.home is not None:
            self.home.end()
        if self.updater is not None:
            self.updater.end()


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
