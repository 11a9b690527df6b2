"""The optional CUDA library: its structures, and its functions as Python calls them."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from attrs import frozen
from torch import Tensor

_POINTER: Final = ctypes.c_void_p


class Piece(ctypes.Structure):
    """`zero_cuda_piece`."""

    _fields_ = (
        *((name, _POINTER) for name in ("param", "grad", "first", "second", "largest", "out")),
        ("step", _POINTER),
        ("numel", ctypes.c_int64),
    )


class Rule(ctypes.Structure):
    """`zero_cuda_rule`."""

    _fields_ = (
        *((f"{name}_dtype", ctypes.c_int32) for name in ("param", "grad", "state", "out")),
        ("maximize", ctypes.c_int32),
        ("decoupled", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("beta1", "beta2", "eps", "weight_decay", "lr")),
        *((name, _POINTER) for name in ("rate", "divisor", "found_inf")),
    )
