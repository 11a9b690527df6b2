"""Tensors that rest on host or disk, and optimizers that step where they rest."""

# Floors, lowest first: errors, torch_private, _native, build, memory, disk, adam, state,
# residence, testing.

from zero_offload.adam.cpu_optimizers import CPUAdagrad, CPUAdam, CPULion
from zero_offload.adam.fused import FusedAdam
from zero_offload.disk.disk_store import DiskStore
from zero_offload.disk.host_store import HostStore
from zero_offload.disk.settings import DiskSettings, DiskStatus
from zero_offload.disk.store import AbstractStore
from zero_offload.disk.tune import tune
from zero_offload.memory.arena import HostArena
from zero_offload.memory.budget import host_memory, set_host_budget
from zero_offload.state.footprint import Footprint
from zero_offload.state.offloaded_state import OffloadedState
from zero_offload.state.optimizer import OffloadedOptimizer

from .__about__ import __version__
from ._native import NativeStatus, native_status
from .errors import (
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
