"""The native surface of csrc/zero_offload.h, as ctypes and numpy see it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Final

import numpy as np
import torch

ABI: Final = 3
ISAS: Final = {"scalar": 0, "vector": 1, "avx2": 2, "avx512": 3}  # the best one last
DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NO_DTYPE: Final = 3

TENSOR: Final = np.dtype(
    [
        ("numel", np.int64),
        ("param", np.uintp),
        ("grad", np.uintp),
        ("first", np.uintp),
        ("second", np.uintp),
        ("largest", np.uintp),
        ("out", np.uintp),
        ("index", np.int64),
    ],
    align=True,
)


class NativeRule(ctypes.Structure):
    """`zero_rule`."""

    _fields_ = (
        *((name, c_int32) for name in ("param_dtype", "grad_dtype", "state_dtype", "out_dtype")),
        *((name, c_int32) for name in ("maximize", "decoupled", "stochastic")),
        *((name, c_float) for name in ("factor", "weight_decay", "shrink")),
        *((name, c_float) for name in ("beta1", "beta2", "one_minus_beta1", "one_minus_beta2")),
        *((name, c_float) for name in ("unbias", "eps", "rate")),
        ("seed", c_uint32),
    )


class AbiError(Exception):
    """A library that this version of the package cannot call; the text says why."""


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library and give its functions their types.

    Raises:
        AbiError: It cannot be loaded, or was built from another version of csrc/.
    """
    try:
        library = ctypes.CDLL(str(path))
        built_for = library.zero_abi()
    except (OSError, AttributeError) as error:
        raise AbiError(f"{path} cannot be loaded: {error}") from error
    if built_for != ABI:
        raise AbiError(f"{path} was built for ABI {built_for}, this package calls ABI {ABI}")
    library.zero_has.argtypes = (c_int,)
    for name in ("zero_adam", "zero_adagrad", "zero_lion"):
        step = getattr(library, name)
        step.argtypes = (c_int, c_void_p, c_int64, POINTER(NativeRule), c_int64, c_int64)
        step.restype = None
    library.zero_count.argtypes = (c_void_p, c_int64)
    library.zero_count.restype = None
    library.zero_take.argtypes = (
        *(c_int, c_void_p, c_int32, c_void_p, c_int32, c_int64),
        *(c_void_p, c_void_p),
    )
    library.zero_take.restype = None
    return library
