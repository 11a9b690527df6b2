"""From what a configuration says of offload to who keeps what."""

from __future__ import annotations

import torch
from zero_offload import DiskSettings, DiskStore, HostArena

from ._delayed_updater import DelayedUpdater
from ._held_back import HeldBack
from ._offload import Offload
from ._shard_homes import DiskHome, HostHome
from ._shard_updater import OffloadedUpdater


def home_and_updater(
    offload: Offload | None, device: torch.device
) -> tuple[HostHome | DiskHome | None, OffloadedUpdater | DelayedUpdater | None]:
    """Who keeps shards of parameters, and optimizer state; None: they rest on the device.

    Where the device is the CPU, so does what rests on the host.

    Raises:
        zero_offload.StoreError: There is no such folder, or it cannot be written to.
    """
    if offload is None:
        return None, None
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
        return home, None
    own_store = store if offload.optimizer == "disk" else None
    if not offload.delayed_update:
        return home, OffloadedUpdater(offload, own_store, lambda: _host_bytes(home))
    room = HeldBack(HostArena("delayed update", is_pinned=offload.pin))
    updater = OffloadedUpdater(offload, own_store, lambda: _host_bytes(home) + room.host_bytes)
    return home, DelayedUpdater(updater, room)


def _host_bytes(home: HostHome | DiskHome | None) -> int:
    return 0 if home is None else home.host_bytes


def _uses_disk(offload: Offload) -> bool:
    state_does = offload.optimizer == "disk" and offload.fraction > 0
    return state_does or offload.params == "disk"


def _open_disk(offload: Offload) -> DiskStore:
    assert offload.path is not None, "Offload has checked it"
    return DiskStore(offload.path, offload.disk or DiskSettings())
