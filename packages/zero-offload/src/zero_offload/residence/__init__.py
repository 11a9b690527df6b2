"""Shards, gradients, backups and delayed steps outside the device; used by partitioning."""

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
