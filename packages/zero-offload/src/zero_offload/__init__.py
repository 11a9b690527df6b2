"""Optimizers that step where tensors rest: on the host, at the speed of its memory."""

from .__about__ import __version__
from ._cpu_adagrad import CPUAdagrad
from ._cpu_adam import CPUAdam
from ._cpu_lion import CPULion
from ._errors import (
    NativeUnavailableError,
    OffloadError,
    RollbackError,
    StepOrderError,
    UnsupportedTensorError,
)
from ._fused_adam import FusedAdam
from ._native import NativeStatus, native_status

__all__ = [
    "CPUAdagrad",
    "CPUAdam",
    "CPULion",
    "FusedAdam",
    "NativeStatus",
    "NativeUnavailableError",
    "OffloadError",
    "RollbackError",
    "StepOrderError",
    "UnsupportedTensorError",
    "__version__",
    "native_status",
]
