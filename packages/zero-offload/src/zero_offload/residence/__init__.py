"""What partitioning asks of those who keep values outside the device; a building block."""

from zero_offload.residence.backup import DiskBackup, HostBackup

__all__ = ["DiskBackup", "HostBackup"]
