"""The optional CUDA library: its structures, and its functions as Python calls them."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Final

from attrs import frozen
from torch import Tensor

from zero_offload.errors import NativeUnavailableError, OffloadError

from ._abi import ABI
from ._compile import CUDA_LIBRARY

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


@frozen(eq=False)
class CudaKernels:
    """The library's functions."""

    library: ctypes.CDLL

    @property
    def piece_numel(self) -> int:
        """Elements of a piece at most."""
        return self.library.zero_cuda_piece_numel()

    def advance(self, steps: Tensor, found_inf: int | None, stream: int) -> None:
        """Add 1 to the steps whose addresses a table on the device has, unless `found_inf`."""
        self._check(self.library.zero_cuda_advance(steps.data_ptr(), len(steps), found_inf, stream))

    def adam(self, pieces: Tensor, num_pieces: int, rule: Rule, stream: int) -> None:
        """One launch over a table of pieces on the device."""
        self._check(
            self.library.zero_cuda_adam(pieces.data_ptr(), num_pieces, ctypes.byref(rule), stream)
        )

    def _check(self, code: int) -> None:
        if code:
            said = self.library.zero_cuda_error(code).decode()
            raise OffloadError(f"FusedAdam: the launch failed with CUDA error {code}: {said}")


@cache
def cuda_kernels() -> CudaKernels:
    """The library, loaded at the first call.

    Raises:
        NativeUnavailableError: It was not built, or is of another version.
    """
    path = Path(__file__).parent / CUDA_LIBRARY
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
    library.zero_cuda_piece_numel.restype = ctypes.c_int64
    library.zero_cuda_advance.argtypes = (_POINTER, ctypes.c_int64, _POINTER, _POINTER)
    library.zero_cuda_adam.argtypes = (_POINTER, ctypes.c_int64, _POINTER, _POINTER)
    library.zero_cuda_error.restype = ctypes.c_char_p
    return CudaKernels(library)
