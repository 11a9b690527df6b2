"""From what a configuration says of offload to who keeps what."""

from __future__ import annotations

import torch
from attrs import frozen
from zero_offload import HostArena

from ._disk import Disk
from ._host_gradients import HostGradients
from ._offload import Offload
from ._shard_homes import DiskHome, HostHome
from ._shard_updater import OffloadedUpdater


@frozen(kw_only=True)
class Elsewhere:
    """Who keeps what outside the device, for `zero_partition.partition`. None: nobody does."""

    home: HostHome | DiskHome | None = None
    updater: OffloadedUpdater | None = None
    gradient_home: HostGradients | None = None

    @classmethod
    def of(cls, offload: Offload | None, device: torch.device) -> Elsewhere:
        """As it was configured; nothing is allocated or opened yet. Local.

        Where the device is the CPU, what rests on the host rests on the device. Gradients wait on
        the host where all of the optimizer's state is stepped there.
        """
        if offload is None:
            return cls()
        disk, home = Disk(offload), None
        if offload.params == "disk":
            home = DiskHome(
                disk,
                HostArena("parameters", is_pinned=offload.pin),
                max_host_numel=offload.max_host_numel,
                budget_bytes=offload.budget_bytes,
            )
        elif offload.params == "host" and device.type != "cpu":
            home = HostHome(HostArena("parameters", is_pinned=offload.pin))
        if offload.optimizer == "device" or not offload.fraction:
            return cls(home=home)
        updater = OffloadedUpdater(
            offload,
            disk if offload.optimizer == "disk" else None,
            lambda: 0 if home is None else home.host_bytes,
        )
        if device.type == "cpu" or offload.fraction < 1:
            return cls(home=home, updater=updater)
        gradients = HostGradients(HostArena("gradients", is_pinned=offload.pin))
        return cls(home=home, updater=updater, gradient_home=gradients)

    def end(self) -> None:
        """Release what was taken."""
        if self.home is not None:
            self.home.end()
        if self.updater is not None:
            self.updater.end()
