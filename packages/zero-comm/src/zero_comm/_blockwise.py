"""Values as integers of 8 or 4 bits, with one scale for each block of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from attrs import field, frozen
from torch import Tensor

from ._codec import AbstractCodec
from ._errors import CodecError

BLOCK: Final = 256
_SCALE_BYTES: Final = 4
_LEAST_SCALE: Final = 2.0**-126  # the least normal number: smaller ones have fewer digits, or none
_LARGEST: Final = torch.finfo(torch.float32).max * (1 - 2.0**-23)  # divided, rounded and multiplied
_SLAB_NUMEL: Final = 2**15  # what the passes over the values of a CPU leave in its cache

# NOTE(again): encoding what was decoded gives the same bytes. With c = 127 or 7, s = fl(a / c) for
# the largest size a of a block, and its decoded value p = fl(c s): where a is not just above a
# power of two, c s is less than half a step from a, so p = a; where it is, p / c is less than half
# a step from s. Either way fl(p / c) = s. Integers come back since they are off by far less than
# half. It takes a correctly rounded division; a product with fl(1 / c) would not do.


@frozen
class Blockwise(AbstractCodec):
    """Each value is the integer nearest to it in steps of its block's scale, even ones at a tie.

    The scale is float32: the largest size in the block divided by 127 (8 bits) or 7 (4 bits), so
    zero is exact and signs are symmetric; never less than 2**-126, so that it is never zero. A
    value comes back within half a scale. A block in which a value is inf or nan comes back as nan,
    all of it. Two integers of 4 bits share a byte, the first one in its low half.

    Args:
        bits: 8 or 4.
        block: Elements that share a scale; even. The last block of a tensor may have fewer.
    """

    bits: int = field()
    block: int = field(default=BLOCK)

    @bits.validator
    def _check_bits(self, _: object, bits: int) -> None:
        if bits not in (8, 4):
            raise CodecError(f"expected 8 or 4 bits, got {bits!r}")

    @block.validator
    def _check_block(self, _: object, block: int) -> None:
        if block < 2 or block % 2:
            raise CodecError(f"expected a block of an even number of elements, got {block!r}")

    def __str__(self) -> str:
        return f"int{self.bits}" if self.block == BLOCK else f"int{self.bits}:{self.block}"

    @property
    def limit(self) -> int:
        """The largest integer."""
        return 2 ** (self.bits - 1) - 1

    def value_bytes(self, numel: int) -> int:
        """Bytes of the integers."""
        return numel if self.bits == 8 else (numel + 1) // 2

    def scale_bytes(self, numel: int) -> int:
        """Bytes of the scales, one for each block."""
        return -(-numel // self.block) * _SCALE_BYTES

    def error_bound(self, values: Tensor) -> Tensor:
        """Half a scale, and what rounding adds to it; the same for all of a block, or nan."""
        bounds = torch.empty(values.numel(), device=values.device)
        for part in self._slabs(values):
            rows = values[part].float().view(self._shape(part))
            half = _scales_of(rows, self.limit) * (0.5 + self.limit * 2.0**-22)
            bounds[part].view(rows.shape).copy_(half.expand(rows.shape))
        return bounds

    def _encode(self, values: Tensor, written: Tensor, scales: Tensor) -> None:
        for part in self._slabs(values):
            rows = values[part].float().view(self._shape(part))
            scale = _scales_of(rows, self.limit)
            scales.view(torch.float32)[self._blocks(part)] = scale.view(-1)
            steps = (rows * scale.reciprocal()).round_().nan_to_num_(nan=0.0).view(-1)
            if self.bits == 8:
                written.view(torch.int8)[part] = steps
            else:
                written[_halved(part)] = _pack_halves(steps)

    def _decode(self, written: Tensor, scales: Tensor, out: Tensor, *, adds: bool) -> None:
        for part in self._slabs(out):
            shape = self._shape(part)
            scale = scales.view(torch.float32)[self._blocks(part)].unsqueeze(1)
            if self.bits == 8:
                steps = written.view(torch.int8)[part]
            else:
                steps = _unpack_halves(written[_halved(part)])[: part.stop - part.start]
            target = out[part].view(shape)
            if adds:
                target += steps.view(shape) * scale
            elif out.dtype == torch.float32:
                torch.mul(steps.view(shape), scale, out=target)
            else:
                target.copy_(steps.view(shape) * scale)

    def _slabs(self, values: Tensor) -> Iterator[slice]:
        """Cuts of whole blocks, and one of what is left after the last whole one."""
        numel = values.numel()
        whole = numel // self.block * self.block
        is_cut = values.device.type == "cpu"
        step = max(1, _SLAB_NUMEL // self.block) * self.block if is_cut else max(1, whole)
        for start in range(0, whole, step):
            yield slice(start, min(start + step, whole))
        if whole < numel:
            yield slice(whole, numel)

    def _shape(self, part: slice) -> tuple[int, int]:
        """One row for each block."""
        numel = part.stop - part.start
        return (1, numel) if numel < self.block else (numel // self.block, self.block)

    def _blocks(self, part: slice) -> slice:
        return slice(part.start // self.block, -(-part.stop // self.block))


def _scales_of(rows: Tensor, limit: int) -> Tensor:
    """A column with one scale for each row; nan where a value is not finite."""
    largest = rows.abs().amax(dim=1, keepdim=True)
    # By a tensor: torch takes a number's inverse instead on CUDA, which is not the same.
    scale = (largest / torch.full_like(largest, limit)).clamp_(_LEAST_SCALE, _LARGEST / limit)
    return scale.masked_fill_(~largest.isfinite(), torch.nan)


def _halved(part: slice) -> slice:
    return slice(part.start // 2, (part.stop + 1) // 2)


def _pack_halves(steps: Tensor) -> Tensor:
    halves = steps.to(torch.int8)
    if halves.numel() % 2:
        halves = torch.nn.functional.pad(halves, (0, 1))
    pairs = halves.view(-1, 2)
    return ((pairs[:, 0] & 15) | (pairs[:, 1] << 4)).view(torch.uint8)


def _unpack_halves(packed: Tensor) -> Tensor:
    pairs = packed.view(torch.int8)
    low = pairs.bitwise_left_shift(4).bitwise_right_shift_(4)  # to carry the sign up
    return torch.stack((low, pairs >> 4), dim=1).view(-1)
