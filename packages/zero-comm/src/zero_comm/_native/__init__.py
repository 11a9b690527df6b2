"""The compiled codecs of a CPU, or the reason why there are none. Nothing compiles here."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final

import torch
from attrs import frozen
from torch import Tensor

from zero_comm.errors import CodecError

HERE: Final = Path(__file__).parent
ABI: Final = 1
SWITCHES: Final = ("auto", "require", "off")
_BUILD_HINT: Final = "`python -m zero_comm.build` compiles it"


@frozen(eq=False)
class CodecKernels:
    """The library's functions, for contiguous tensors of a CPU whose sizes fit."""

    dtypes: ClassVar = (torch.float32,)
    library: ctypes.CDLL

    def encode(
        self, values: Tensor, integers: Tensor, scales: Tensor, *, bits: int, block: int
    ) -> None:
        """Write float32 values as integers and scales, both uint8."""
        self.library.zero_comm_encode(
            values.data_ptr(), values.numel(), bits, block, integers.data_ptr(), scales.data_ptr()
        )

    def decode(
        self, integers: Tensor, scales: Tensor, out: Tensor, *, bits: int, block: int, adds: bool
    ) -> None:
        """Write float32 `out`, or add to it."""
        self.library.zero_comm_decode(
            *(integers.data_ptr(), scales.data_ptr(), out.numel()),
            *(bits, block, out.data_ptr(), adds),
        )


def load(path: Path, environment: Mapping[str, str]) -> tuple[CodecKernels | None, str]:
    """Load the library at `path` as ZERO_COMM_NATIVE asks: auto, require or off.

    Raises:
        CodecError: It is required and missing, or the switch has a value it does not know.
    """
    switch = switch_of("ZERO_COMM_NATIVE", environment)
    if switch == "off":
        return None, "ZERO_COMM_NATIVE=off"
    if not path.exists():
        reason = (
            f"{path} does not exist: it was not compiled when this was installed; {_BUILD_HINT}"
        )
    else:
        try:
            return CodecKernels(open_library(path)), ""
        except OSError as error:
            reason = f"{path} cannot be loaded: {error}; {_BUILD_HINT} anew"
    if switch == "require":
        raise CodecError(f"ZERO_COMM_NATIVE=require, but {reason}")
    return None, reason


def switch_of(name: str, environment: Mapping[str, str]) -> str:
    """Return the value of a switch in the environment; "auto" where it is not set.

    Raises:
        CodecError: The switch has an unknown value.
    """
    switch = environment.get(name) or "auto"
    if switch not in SWITCHES:
        raise CodecError(f"{name}={switch!r}: expected one of {', '.join(SWITCHES)}")
    return switch


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library and give its functions their types.

    Raises:
        OSError: It cannot be loaded, or was built from another version of the sources.
    """
    try:
        library = ctypes.CDLL(str(path))
        built_for = library.zero_comm_abi()
    except AttributeError as error:
        raise OSError(str(error)) from error
    if built_for != ABI:
        raise OSError(f"it was built for ABI {built_for}, this package calls ABI {ABI}")
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.zero_comm_encode.argtypes = (pointer, count, number, count, pointer, pointer)
    library.zero_comm_encode.restype = None
    library.zero_comm_decode.argtypes = (
        *(pointer, pointer, count),
        *(number, count, pointer, number),
    )
    library.zero_comm_decode.restype = None
    return library
