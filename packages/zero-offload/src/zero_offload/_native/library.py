"""The native surface of csrc/zero_offload.h, as ctypes and numpy see it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from zero_offload.errors import NativeUnavailableError, OffloadError

ABI: Final = 4
# Number of each instruction set in `zero_offload.h`, the fastest last.
ISAS: Final = {"scalar": 0, "vector": 1, "avx2": 2, "avx512": 3}
DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NO_DTYPE: Final = 3
# Fields of `zero_tensor` that are addresses of tensors, in its order.
COLUMNS: Final = ("param", "grad", "first", "second", "largest", "out")
# `zero_tensor`: the number and the addresses of a run of elements of one parameter.
TENSOR: Final = np.dtype(
    [
        ("numel", np.int64),
        *((name, np.uintp) for name in COLUMNS),
        ("index", np.int64),
        ("step", np.uintp),
    ],
    align=True,
)


class Formula(IntEnum):
    """Optimizer whose update a kernel computes."""

    ADAM = 0
    ADAGRAD = 1
    LION = 2


class Rule(ctypes.Structure):
    """`zero_rule`: the numbers of one step, computed in double as torch does, and fp32 here.

    Attributes:
        factor: Factor that gradients are multiplied by first: unscaling and clipping.
        weight_decay: Added to the gradient times the parameter, unless decoupled.
        shrink: Factor that the parameter is multiplied by, if decoupled.
        unbias: Adam's 1 / sqrt(1 - beta2^t), a factor of the root of the second moment.
        rate: Minus the step size, with Adam's bias correction.
        stochastic: Whether to round stochastically, by `seed`, which differs for each step.
    """

    _fields_ = (
        ("formula", c_int32),
        *((f"{name}_dtype", c_int32) for name in ("param", "grad", "state", "out")),
        *((name, c_int32) for name in ("maximize", "decoupled", "stochastic")),
        *((name, c_float) for name in ("factor", "weight_decay", "shrink")),
        *((name, c_float) for name in ("beta1", "beta2", "one_minus_beta1", "one_minus_beta2")),
        *((name, c_float) for name in ("unbias", "eps", "rate")),
        ("seed", c_uint32),
    )

    def __init__(
        self, formula: Formula, *, beta1: float = 0.0, beta2: float = 0.0, **numbers: Any
    ) -> None:
        numbers = {"factor": 1.0, "shrink": 1.0, "unbias": 1.0} | numbers
        super().__init__(
            formula=formula,
            beta1=beta1,
            beta2=beta2,
            one_minus_beta1=1 - beta1,
            one_minus_beta2=1 - beta2,
            **numbers,
        )


class Transfer(ctypes.Structure):
    """`zero_transfer`: one read or write of a file, for the functions of disk I/O."""

    _fields_ = (
        *(("fd", c_int32), ("writes", c_int32), ("memory", c_void_p)),
        *((name, c_int64) for name in ("nbytes", "offset", "block_bytes", "align")),
        *(("bounce", c_void_p), ("depth", c_int32)),
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
    library.zero_step.argtypes = (c_int, c_void_p, c_int64, POINTER(Rule), c_int64, c_int64)
    library.zero_count.argtypes = (c_void_p, c_int64)
    library.zero_sum_squares.argtypes = (c_int, c_void_p, c_int32, c_int64, c_void_p, c_void_p)
    for function in (library.zero_step, library.zero_count, library.zero_sum_squares):
        function.restype = None
    return with_io(library)


def with_io(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give a library's functions for disk I/O their types, and return the library."""
    library.zero_ring_open.argtypes = (c_int32, POINTER(c_void_p))
    library.zero_ring_close.argtypes = (c_void_p,)
    library.zero_ring_close.restype = None
    library.zero_ring_move.argtypes = (c_void_p, POINTER(Transfer))
    library.zero_ring_move.restype = c_int64
    library.zero_crc32c.argtypes = (c_uint32, c_void_p, c_int64)
    library.zero_crc32c.restype = c_uint32
    return library


def open_cuda_library(path: Path) -> ctypes.CDLL:
    """Load the optional library for CUDA and give its functions their types.

    A launch that fails raises OffloadError.

    Raises:
        NativeUnavailableError: It was not built, or is of another version.
    """
    if not path.exists():
        raise NativeUnavailableError(
            f"{path} does not exist: there was no nvcc when this was installed; with one on PATH, "
            "`python -m zero_offload.build` compiles it. torch.optim.AdamW(fused=True) needs none"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"{path} cannot be loaded: {error}") from error
    if library.zero_cuda_abi() != ABI:
        raise NativeUnavailableError(
            f"{path} is of another version; `python -m zero_offload.build` compiles it anew"
        )

    def check(code: Any, *_: Any) -> Any:
        if code:
            said = library.zero_cuda_error(code).decode()
            raise OffloadError(f"FusedAdam: the launch failed with CUDA error {code}: {said}")
        return code

    library.zero_cuda_error.restype = ctypes.c_char_p
    library.zero_cuda_piece_numel.restype = c_int64
    library.zero_cuda_advance.argtypes = (c_void_p, c_int64, c_void_p, c_void_p)
    library.zero_cuda_adam.argtypes = (c_void_p, c_int64, POINTER(Rule), *[c_void_p] * 4)
    for function in (library.zero_cuda_advance, library.zero_cuda_adam):
        function.errcheck = check
    return library
