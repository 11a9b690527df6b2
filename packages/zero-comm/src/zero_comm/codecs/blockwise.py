"""Values as integers of 8 or 4 bits, with one scale for each block of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from attrs import field, frozen
from torch import Tensor

from zero_comm.errors import CodecError

from .codec import AbstractCodec, decode_blocks, encode_blocks, scales_of
from .kernels import kernels

BLOCK: Final = 256
_SCALE_BYTES: Final = 4


@frozen
class Blockwise(AbstractCodec):
    """Each value is the integer nearest to it in steps of its block's scale, even ones at a tie.

    The scale is float32: the largest size in the block divided by 127 (8 bits) or 7 (4 bits), so
    zero is exact and signs are symmetric; never less than 2**-126, so that it is never zero. A
    decoded value differs by half a scale at most. If a value of a block is inf or nan, all values
    of the block are decoded as nan. Two integers of 4 bits share a byte, the first in its low half.

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

    @property
    def granule(self) -> int:
        """Number of elements of a block."""
        return self.block

    def error_bound(self, values: Tensor) -> Tensor:
        """Half a scale, and what rounding adds to it; the same for all of a block, or nan."""
        scales = scales_of(values.float(), limit=self.limit, block=self.block)
        bounds = scales * (0.5 + self.limit * 2.0**-22)
        return bounds.repeat_interleave(self.block)[: values.numel()]

    def _encode(self, values: Tensor, written: Tensor, scales: Tensor) -> None:
        found = kernels(values.device)
        encode = encode_blocks if found is None else found.encode
        at_once = found is not None and values.dtype in found.dtypes
        for part, integers, scale in self._parts(values, written, scales, at_once=at_once):
            source = part if at_once else part.float()
            encode(source, integers, scale, bits=self.bits, block=self.block)

    def _decode(self, written: Tensor, scales: Tensor, out: Tensor, *, adds: bool) -> None:
        found = kernels(out.device)
        decode = decode_blocks if found is None else found.decode
        at_once = found is not None and out.dtype in found.dtypes
        for part, integers, scale in self._parts(out, written, scales, at_once=at_once):
            # `float` returns the part itself if it is float32.
            target = part if at_once else part.float()
            decode(integers, scale, target, bits=self.bits, block=self.block, adds=adds)
            if target is not part:
                part.copy_(target)

    def _parts(
        self, values: Tensor, written: Tensor, scales: Tensor, *, at_once: bool
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Values of whole blocks, their integers and their scales; all of it where that is best."""
        if at_once:
            yield values, written, scales
            return
        for span in self.spans(values):
            first, last = (
                (self.value_bytes(at), self.scale_bytes(at)) for at in (span.start, span.stop)
            )
            yield values[span], written[first[0] : last[0]], scales[first[1] : last[1]]
