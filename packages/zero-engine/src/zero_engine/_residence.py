"""From what a configuration says of offload to who keeps what."""

from __future__ import annotations

import torch
from attrs import frozen
from zero_offload import DiskSettings, DiskStore, HostArena

from ._host_gradients import HostGradients
from ._offload import Offload
from ._shard_homes import DiskHome, HostHome
from ._shard_updater import OffloadedUpdater


@frozen(kw_only=True)
class Keepers:
    """Who keeps what outside the device: arguments of `zero_partition.partition`. None: nobody."""

    home: HostHome | DiskHome | None = None
    updater: OffloadedUpdater | None = None
    gradient_home: HostGradients | None = None


def keepers_of(offload: Offload | None, device: torch.device) -> Keepers:
    """Who they are. Where the device is the CPU, what rests on the host rests on the device.

    Gradients wait on the host where all of the optimizer's state is stepped there.

    Raises:
        zero_offload.StoreError: There is no such folder, or it cannot be written to.
    """
    if offload is None:
        return Keepers()
    home: HostHome | DiskHome | None = None
    keeps_state = offload.optimizer != "device" and offload.fraction > 0
    store = _open_disk(offload) if _uses_disk(offload) else None
    if offload.params == "disk":
        assert store is not None, "opened above"
        home = DiskHome(
            store,
            HostArena("parameters", is_pinned=offload.pin),
            closes_store=not (keeps_state and offload.optimizer == "disk"),
            max_host_numel=offload.max_host_numel,
            budget_bytes=offload.budget_bytes,
        )
    elif offload.params == "host" and device.type != "cpu":
        home = HostHome(HostArena("parameters", is_pinned=offload.pin))
    if not keeps_state:
        return Keepers(home=home)
    own_store = store if offload.optimizer == "disk" else None
    updater = OffloadedUpdater(offload, own_store, lambda: home.host_bytes if home else 0)
    if device.type == "cpu" or offload.fraction < 1:
        return Keepers(home=home, updater=updater)
    gradients = HostGradients(HostArena("gradients", is_pinned=offload.pin))
    return Keepers(home=home, updater=updater, gradient_home=gradients)


def _uses_disk(offload: Offload) -> bool:
    state_does = offload.optimizer == "disk" and offload.fraction > 0
    return state_does or offload.params == "disk"


def _open_disk(offload: Offload) -> DiskStore:
    assert offload.path is not None, "Offload has checked it"
    return DiskStore(offload.path, offload.disk or DiskSettings())
