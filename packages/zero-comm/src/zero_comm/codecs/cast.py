"""Values in another floating-point dtype."""

from __future__ import annotations

from typing import Final

import torch
from attrs import field, frozen
from torch import Tensor

from zero_comm.errors import CodecError

from .codec import AbstractCodec

NAMES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_HALF_STEP: Final = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}
_HALF_OF_LEAST: Final = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 0.0}


@frozen
class Cast(AbstractCodec):
    """Values travel as `dtype`: bfloat16, float16 or float32, rounded to the nearest.

    Values beyond the range of float16 (65504) become inf, as by any conversion. float32 loses
    nothing; it is for 16-bit gradients that are to be reduced in more bits than they have.
    """

    dtype: torch.dtype = field()

    @dtype.validator
    def _check_dtype(self, _: object, dtype: torch.dtype) -> None:
        if dtype not in NAMES:
            raise CodecError(f"expected bfloat16, float16 or float32 to cast to, got {dtype}")

    def __str__(self) -> str:
        return NAMES[self.dtype]

    def value_bytes(self, numel: int) -> int:
        """Bytes of the values themselves."""
        return numel * self.dtype.itemsize

    def scale_bytes(self, numel: int) -> int:
        """Return 0: there are no scales."""
        return 0

    @property
    def granule(self) -> int:
        """Return 1: each value is encoded by itself."""
        return 1

    def error_bound(self, values: Tensor) -> Tensor:
        """Return half the distance of the dtype's two nearest numbers; inf beyond its range."""
        size = values.float().abs()
        bound = size * _HALF_STEP[self.dtype] + _HALF_OF_LEAST[self.dtype]
        return bound.masked_fill_(~values.to(self.dtype).isfinite(), torch.inf)

    def _encode(self, values: Tensor, written: Tensor, scales: Tensor) -> None:
        written.view(self.dtype).copy_(values)

    def _decode(self, written: Tensor, scales: Tensor, out: Tensor, *, adds: bool) -> None:
        values = written.view(self.dtype)
        if not adds:
            out.copy_(values)
            return
        for span in self.spans(out):
            # Adding a tensor of another dtype is slow, so it is converted first.
            out[span] += values[span].float()
