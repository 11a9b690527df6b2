"""Implementation of the protocols by which zero_partition offloads: `zero_partition.memory.seams`.

`OffloadedShards` (shards.py) stores shards of parameters in host memory and on disk, and reads them
back before their unit is gathered. Gradients go to the host by `HostGradients`
(`zero_offload.state.gradients`), and the optimizer's state is an `OffloadedState`
(`zero_offload.state`). `DelayedState` (delayed.py) runs its steps in a thread, so that their values
are used one step late. `HostBackup` and `DiskBackup` (backup.py) store training state while another
phase uses the device.

zero_partition calls these by their methods and imports nothing of this package; `zero_engine`
connects both. Read shards.py first. What must never happen: a read returns values from before the
last write, or a step that failed is taken for done.
"""

from zero_offload.residence.backup import DiskBackup, HostBackup
from zero_offload.residence.delayed import DelayedState, with_delay
from zero_offload.residence.shards import (
    COPIES_BEHIND,
    FREE_SHARDS,
    WRITES_BEHIND,
    OffloadedShards,
    first_that_fit,
)
from zero_offload.state.gradients import HostGradients

__all__ = [
    "COPIES_BEHIND",
    "FREE_SHARDS",
    "WRITES_BEHIND",
    "DelayedState",
    "DiskBackup",
    "HostBackup",
    "HostGradients",
    "OffloadedShards",
    "first_that_fit",
    "with_delay",
]
