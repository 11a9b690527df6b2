"""Tensors that rest on host or disk, and optimizers that step where they rest."""

from .__about__ import __version__
from ._arena import HostArena
from ._cpu_adagrad import CPUAdagrad
from ._cpu_adam import CPUAdam
from ._cpu_lion import CPULion
from ._disk_settings import DiskSettings, DiskStatus
from ._disk_store import DiskStore
from ._errors import (
    BudgetError,
    DepartedGradientError,
    NativeUnavailableError,
    OffloadError,
    RollbackError,
    StepOrderError,
    StoreError,
    TornStepError,
    UnsupportedOptimizerError,
    UnsupportedTensorError,
)
from ._footprint import Footprint
from ._fused_adam import FusedAdam
from ._host_budget import host_memory, set_host_budget
from ._host_store import HostStore
from ._native import NativeStatus, native_status
from ._offloaded import OffloadedOptimizer
from ._offloaded_state import OffloadedState
from ._store import AbstractStore
from ._tune import tune

__all__ = [
    "AbstractStore",
    "BudgetError",
    "CPUAdagrad",
    "CPUAdam",
    "CPULion",
    "DepartedGradientError",
    "DiskSettings",
    "DiskStatus",
    "DiskStore",
    "Footprint",
    "FusedAdam",
    "HostArena",
    "HostStore",
    "NativeStatus",
    "NativeUnavailableError",
    "OffloadError",
    "OffloadedOptimizer",
    "OffloadedState",
    "RollbackError",
    "StepOrderError",
    "StoreError",
    "TornStepError",
    "UnsupportedOptimizerError",
    "UnsupportedTensorError",
    "__version__",
    "host_memory",
    "native_status",
    "set_host_budget",
    "tune",
]
