"""Tensors that rest on host or disk, and optimizers that step where they rest."""

from .__about__ import __version__
from ._arena import HostArena
from ._disk_settings import DiskSettings, DiskStatus
from ._disk_store import DiskStore
from ._errors import BudgetError, OffloadError, StoreError
from ._host_budget import host_memory, set_host_budget
from ._host_store import HostStore
from ._store import AbstractStore
from ._tune import tune

__all__ = [
    "AbstractStore",
    "BudgetError",
    "DiskSettings",
    "DiskStatus",
    "DiskStore",
    "HostArena",
    "HostStore",
    "OffloadError",
    "StoreError",
    "__version__",
    "host_memory",
    "set_host_budget",
    "tune",
]
