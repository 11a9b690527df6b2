"""Blockwise codecs of CUDA tensors in one pass over memory, with the bits of `codec.py`.

Triton is imported here, so this file is imported only where there is Triton: by `kernels.py`.
"""

from typing import ClassVar, Final, final

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from attrs import frozen
from torch import Tensor

from .codec import DTYPES, LARGEST, LEAST_SCALE

# ruff: noqa: PLR0917 - kernels take many scalars, by position


# NOTE(bits): a product and a sum must not become one operation, which rounds once where torch
# rounds twice: every launch forbids it. Divisions are `div_rn`, since `/` is an approximation.
# Absolute values are compared as integers, which have the same order, with inf and nan last.
LAUNCH: Final = {"num_warps": 8, "enable_fp_fusion": False}
_TILE: Final = 4096  # elements of a program's tile

_LEAST: Final = tl.constexpr(LEAST_SCALE)
_MOST: Final = tl.constexpr(LARGEST)
# 1.5 * 2**23: in the sum with a float32, the low bits are the rounded integer.
_TO_INTEGER: Final = tl.constexpr(12582912.0)
_INFINITE: Final = tl.constexpr(0x7F800000)
_NAN: Final = tl.constexpr(0x7FC00000)


@final
@frozen(eq=False)
class TritonKernels:
    """Encoding and decoding of 1-D contiguous CUDA tensors of one device.

    Their sizes must fit each other; any numel.
    """

    dtypes: ClassVar = DTYPES

    def encode(
        self, values: Tensor, integers: Tensor, scales: Tensor, *, bits: int, block: int
    ) -> None:
        """Write values as integers and scales, both uint8."""
        if numel := values.numel():
            tensors = values, integers.view(torch.int8), scales.view(torch.int32)
            # Triton launches kernels on the current device.
            with torch.cuda.device_of(values):
                _encode[_grid(numel, block)](
                    *(*tensors, numel, integers.numel()), **tile_of(bits, block), **LAUNCH
                )

    def decode(
        self, integers: Tensor, scales: Tensor, out: Tensor, *, bits: int, block: int, adds: bool
    ) -> None:
        """Write `out`, or add to it."""
        if numel := out.numel():
            tensors = integers.view(torch.int8), scales.view(torch.float32), out
            with torch.cuda.device_of(out):
                _decode[_grid(numel, block)](
                    *(*tensors, numel, integers.numel()),
                    **(tile_of(bits, block) | {"ADDS": adds}),
                    **LAUNCH,
                )


def tile_of(bits: int, block: int) -> dict[str, int]:
    """Return the shape of a program's tile: a row for each block, or part of one long block."""
    columns = min(triton.next_power_of_2(block), _TILE)
    return {"BITS": bits, "BLOCK": block, "ROWS": _TILE // columns, "COLUMNS": columns}


def _grid(numel: int, block: int) -> tuple[int]:
    return (triton.cdiv(numel, tile_of(8, block)["ROWS"] * block),)


@triton.jit
def _encode(
    values,
    integers,
    scales,
    numel,
    num_bytes,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    limit: tl.constexpr = 127.0 if BITS == 8 else 7.0
    first = tl.program_id(0).to(tl.int64) * ROWS
    # The first tile of a block stays in registers; the rest of a long block is read twice.
    tile = _read(values, first, 0, numel, BLOCK, ROWS, COLUMNS)
    most = _largest(tile)
    for start in range(COLUMNS, BLOCK, COLUMNS):
        rest = _read(values, first, start, numel, BLOCK, ROWS, COLUMNS)
        most = tl.maximum(most, _largest(rest))

    is_finite = most < _INFINITE
    largest = tl.where(is_finite, most, 0).to(tl.float32, bitcast=True)
    scale = tl.minimum(tl.maximum(tl.div_rn(largest, limit), _LEAST), _MOST / limit)
    row = first + tl.arange(0, ROWS)
    written = tl.where(is_finite, scale.to(tl.int32, bitcast=True), _NAN)
    tl.store(scales + row, written, mask=row * BLOCK < numel)

    inverse = tl.div_rn(1.0, scale)
    _write(tile, inverse, is_finite, integers, first, 0, num_bytes, BITS, BLOCK, ROWS, COLUMNS)
    for start in range(COLUMNS, BLOCK, COLUMNS):
        rest = _read(values, first, start, numel, BLOCK, ROWS, COLUMNS)
        _write(
            rest, inverse, is_finite, integers, first, start, num_bytes, BITS, BLOCK, ROWS, COLUMNS
        )


@triton.jit
def _decode(
    integers,
    scales,
    out,
    numel,
    num_bytes,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADDS: tl.constexpr,
):
    shared: tl.constexpr = 8 // BITS  # integers in a byte
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)
    scale = tl.load(scales + row, mask=row * BLOCK < numel, other=0.0)[:, None]
    for start in range(0, BLOCK, COLUMNS):
        at, is_there = _places(
            first, start // shared, num_bytes, BLOCK // shared, ROWS, COLUMNS // shared
        )
        steps = tl.load(integers + at, mask=is_there, other=0).to(tl.int32)
        if BITS == 4:
            # The shifts extend the signs of both halves of a byte.
            steps = tl.interleave((steps << 28) >> 28, steps >> 4)
        value = steps.to(tl.float32) * scale
        at, is_there = _places(first, start, numel, BLOCK, ROWS, COLUMNS)
        if ADDS:
            value = tl.load(out + at, mask=is_there, other=0.0).to(tl.float32) + value
        tl.store(out + at, value.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _places(first, start, numel, ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the offsets of a tile's elements, and a mask of those that exist.

    The tile begins at row `first` and column `start`; each row has ROW elements.
    """
    columns = start + tl.arange(0, COLUMNS)[None, :]
    at = first * ROW + (tl.arange(0, ROWS)[:, None] * ROW + columns)
    is_there = at < numel
    if ROW % COLUMNS != 0:
        is_there = is_there & (columns < ROW)
    return at, is_there


@triton.jit
def _read(
    values, first, start, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    at, is_there = _places(first, start, numel, BLOCK, ROWS, COLUMNS)
    return tl.load(values + at, mask=is_there, other=0.0).to(tl.float32)


@triton.jit
def _largest(tile):
    return tl.max(tile.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def _write(
    tile,
    inverse,
    is_finite,
    integers,
    first,
    start,
    num_bytes,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    shared: tl.constexpr = 8 // BITS
    steps = (tile * inverse[:, None] + _TO_INTEGER).to(tl.int32, bitcast=True)
    steps = tl.where(is_finite[:, None], steps, 0)
    if BITS == 4:
        low, high = tl.split(tl.reshape(steps, (ROWS, COLUMNS // 2, 2)))
        steps = (low & 15) | (high << 4)
    at, is_there = _places(
        first, start // shared, num_bytes, BLOCK // shared, ROWS, COLUMNS // shared
    )
    tl.store(integers + at, steps.to(tl.int8), mask=is_there)
