"""Tensors that are offloaded to host or disk, and optimizers that step them there."""

# Layers, lowest first: errors, torch_private, ranges, _native, build, memory, disk, adam, state,
# residence, testing.

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from zero_offload.__about__ import __version__

if TYPE_CHECKING:
    from zero_offload._native import native_status
    from zero_offload.adam.cpu_optimizers import CPUAdagrad, CPUAdam, CPULion
    from zero_offload.adam.fused import FusedAdam
    from zero_offload.disk.disk_store import DiskStore
    from zero_offload.disk.host_store import HostStore
    from zero_offload.disk.settings import DiskSettings, DiskStatus
    from zero_offload.disk.store import AbstractStore
    from zero_offload.disk.tune import tune
    from zero_offload.errors import (
        BudgetError,
        DepartedGradientError,
        NativeUnavailableError,
        OffloadError,
        StoreError,
        TornStepError,
        UnsupportedOptimizerError,
        UnsupportedTensorError,
    )
    from zero_offload.memory.arena import HostArena
    from zero_offload.memory.budget import host_memory, set_host_budget
    from zero_offload.state.footprint import Footprint
    from zero_offload.state.offloaded_state import OffloadedState
    from zero_offload.state.optimizer import OffloadedOptimizer

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
    "NativeUnavailableError",
    "OffloadError",
    "OffloadedOptimizer",
    "OffloadedState",
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

# Module -> its names that are loaded on first use.
_NAMES: Final = {
    "zero_offload._native": "native_status",
    "zero_offload.adam.cpu_optimizers": "CPUAdagrad CPUAdam CPULion",
    "zero_offload.adam.fused": "FusedAdam",
    "zero_offload.disk.disk_store": "DiskStore",
    "zero_offload.disk.host_store": "HostStore",
    "zero_offload.disk.settings": "DiskSettings DiskStatus",
    "zero_offload.disk.store": "AbstractStore",
    "zero_offload.disk.tune": "tune",
    "zero_offload.errors": (
        "BudgetError DepartedGradientError NativeUnavailableError OffloadError "
        "StoreError TornStepError UnsupportedOptimizerError "
        "UnsupportedTensorError"
    ),
    "zero_offload.memory.arena": "HostArena",
    "zero_offload.memory.budget": "host_memory set_host_budget",
    "zero_offload.state.footprint": "Footprint",
    "zero_offload.state.offloaded_state": "OffloadedState",
    "zero_offload.state.optimizer": "OffloadedOptimizer",
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Load what a name needs when it is first asked for (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_MODULES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
