"""Checksums of what rests on disk, with the name of the algorithm beside the value."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from typing import Final

from attrs import frozen
from torch import Tensor

_BLOCK_BYTES: Final = 2**30  # zlib takes no more than 4 GiB


@frozen
class Checksum:
    """What was computed, and how."""

    algorithm: str
    value: int


@frozen
class Checksummer:
    """One way of computing checksums; releases the GIL."""

    algorithm: str
    update: Callable[[int, int, int], int]  # (value so far, address, bytes) -> value

    def of(self, tensor: Tensor) -> Checksum:
        """Over the bytes of a contiguous CPU tensor."""
        value, address = 0, tensor.data_ptr()
        for start in range(0, tensor.nbytes, _BLOCK_BYTES):
            size = min(_BLOCK_BYTES, tensor.nbytes - start)
            value = self.update(value, address + start, size)
        return Checksum(self.algorithm, value)


def choose_checksummer(library: ctypes.CDLL | None) -> Checksummer:
    """CRC-32C by the processor where the native library has it, else zlib's CRC-32."""
    if library is not None and library.zero_has_crc32c():
        return Checksummer("crc32c", library.zero_crc32c)
    return Checksummer("crc32", _crc32)


def _crc32(value: int, address: int, nbytes: int) -> int:
    return zlib.crc32((ctypes.c_char * nbytes).from_address(address), value)
