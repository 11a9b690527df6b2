"""Codecs: how values are written in fewer bytes while they travel.

Encoded values are one chunk of bytes, `[values | zeros up to a multiple of 4 | scales]`, whose size
follows from the number of elements alone, so that ranks know what to expect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import lcm
from typing import Final

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import pad

from zero_comm.errors import CodecError

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
SPAN_NUMEL: Final = 2**15
_ALIGN: Final = 4  # bytes of a scale


@frozen
class AbstractCodec(ABC):
    """Writes float32, bfloat16 or float16 values as bytes, and reads them back. Local.

    Equal values give equal bytes on every device, whatever their dtype. `str()` gives the name that
    `parse_codec()` takes.
    """

    @abstractmethod
    def value_bytes(self, numel: int) -> int:
        """Bytes of the values themselves."""

    @abstractmethod
    def scale_bytes(self, numel: int) -> int:
        """Bytes of the scales that decoding needs beside the values."""

    @property
    @abstractmethod
    def granule(self) -> int:
        """Number of elements that, as its multiples, are encoded independently of the others."""

    @abstractmethod
    def error_bound(self, values: Tensor) -> Tensor:
        """Return the largest possible error of each value: float32, as many as `values`.

        The bound is for values decoded to float32; in 16 bits they are rounded once more. A value
        that is not finite after decoding has no bound: nan, or inf.
        """

    @abstractmethod
    def _encode(self, values: Tensor, written: Tensor, scales: Tensor) -> None:
        """Fill `written` and `scales`."""

    @abstractmethod
    def _decode(self, written: Tensor, scales: Tensor, out: Tensor, *, adds: bool) -> None:
        """Write `out`, or add to it."""

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether the codec encodes values of this dtype."""
        return dtype in DTYPES

    def wire_bytes(self, numel: int) -> int:
        """Bytes of `numel` elements, once encoded: those of values, zeros and scales."""
        return self._start_of_scales(numel) + self.scale_bytes(numel)

    @torch.no_grad()
    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """Write values as bytes.

        Args:
            values: 1-D, contiguous; float32, bfloat16 or float16. Not written.
            out: Receives the bytes: uint8, 1-D, contiguous, `wire_bytes(values.numel())` of them,
                on the same device, at a multiple of 4 bytes. Allocated when None.

        Returns:
            `out`.

        Raises:
            CodecError: A tensor does not fit.
        """
        numel = values.numel()
        check_encodable((values,), self)
        _check_flat(values, "values")
        if out is None:
            out = torch.empty(self.wire_bytes(numel), dtype=torch.uint8, device=values.device)
        self._check_wire(out, numel)
        self.encode_span(values, out, start=0, numel=numel)
        return out

    @torch.no_grad()
    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        """Read values back.

        Args:
            wire: What `encode` wrote, of as many values as `out` has.
            out: Overwritten: 1-D, contiguous; float32, bfloat16 or float16.

        Returns:
            `out`.

        Raises:
            CodecError: A tensor does not fit.
        """
        return self._read(wire, out, adds=False)

    @torch.no_grad()
    def decode_add(self, wire: Tensor, out: Tensor) -> Tensor:
        """Read values back and add them to `out`, which is float32; otherwise as `decode`."""
        if out.dtype != torch.float32:
            raise CodecError(f"expected float32 to add decoded values to, got {out.dtype}")
        return self._read(wire, out, adds=True)

    @torch.no_grad()
    def relative_error(self, values: Tensor) -> Tensor:
        """Return the relative error of `values`: the norm of the errors by that of the values.

        A float32 scalar on their device, which the host does not wait for; 0 if all values are 0,
        nan if a value is not finite. Encodes and decodes all of them, for a report.
        """
        exact = values.float()
        lost = self.decode(self.encode(values), torch.empty_like(exact)).sub_(exact)
        share = torch.linalg.vector_norm(lost) / torch.linalg.vector_norm(exact)
        return torch.where((exact == 0).all(), torch.zeros_like(share), share)

    def _read(self, wire: Tensor, out: Tensor, *, adds: bool) -> Tensor:
        numel = out.numel()
        check_encodable((out,), self)
        _check_flat(out, "out")
        self._check_wire(wire, numel)
        self.decode_span(wire, out, start=0, numel=numel, adds=adds)
        return out

    def encode_span(self, values: Tensor, wire: Tensor, *, start: int, numel: int) -> None:
        """Write a span of `numel` values that begins at a multiple of the granule. Unchecked."""
        written, scales = self._span(wire, start, values.numel(), numel)
        self._encode(values, written, scales)
        if start + values.numel() == numel:
            wire[self.value_bytes(numel) : self._start_of_scales(numel)] = 0

    def decode_span(
        self, wire: Tensor, out: Tensor, *, start: int, numel: int, adds: bool = False
    ) -> None:
        """Read a span of `numel` values back, as `encode_span` wrote it. Unchecked."""
        written, scales = self._span(wire, start, out.numel(), numel)
        self._decode(written, scales, out, adds=adds)

    def spans(self, values: Tensor, *, granule: int = 1) -> Iterator[slice]:
        """Yield slices that stay in a CPU's cache for several passes; one on other devices."""
        numel, step = values.numel(), lcm(self.granule, granule)
        step = max(1, SPAN_NUMEL // step) * step if values.device.type == "cpu" else numel
        for start in range(0, numel, max(1, step)):
            yield slice(start, min(start + step, numel))

    def _span(self, wire: Tensor, start: int, length: int, numel: int) -> tuple[Tensor, Tensor]:
        """Return the parts of `wire` for the values and the scales of a span."""
        at, scales_at = self.value_bytes(start), self._start_of_scales(numel)
        scales_at += self.scale_bytes(start)
        written = wire[at : at + self.value_bytes(length)]
        return written, wire[scales_at : scales_at + self.scale_bytes(length)]

    def _start_of_scales(self, numel: int) -> int:
        return -(-self.value_bytes(numel) // _ALIGN) * _ALIGN

    def _check_wire(self, wire: Tensor, numel: int) -> None:
        expected = self.wire_bytes(numel)
        if (
            wire.dtype != torch.uint8
            or wire.shape != (expected,)
            or not wire.is_contiguous()
            or wire.storage_offset() % _ALIGN
        ):
            raise CodecError(
                f"{self} writes {numel} elements as {expected} bytes: expected that many uint8, "
                f"1-D, contiguous, at a multiple of {_ALIGN} bytes, got {wire.dtype} of shape "
                f"{tuple(wire.shape)} at byte {wire.storage_offset()}; `wire_bytes()` says how "
                "many bytes it takes"
            )


def check_encodable(tensors: Sequence[Tensor], codec: AbstractCodec | None) -> None:
    """Raise CodecError if a codec does not take their dtypes."""
    for tensor in tensors:
        if codec is not None and tensor.dtype not in DTYPES:
            raise CodecError(
                f"{codec} encodes float32, bfloat16 and float16, got {tensor.dtype}; convert the "
                "values, or let them travel as they are, without a codec"
            )


def _check_flat(values: Tensor, name: str) -> None:
    if values.dim() != 1 or not values.is_contiguous():
        raise CodecError(
            f"expected {name} to be 1-D and contiguous, got shape {tuple(values.shape)}; flatten "
            "them with tensor.contiguous().view(-1)"
        )


# The least normal number: smaller ones have fewer digits, or are flushed to zero.
LEAST_SCALE: Final = 2.0**-126
# The largest scale times the largest integer: rounded, the product is still finite.
LARGEST: Final = torch.finfo(torch.float32).max * (1 - 2.0**-23)

# NOTE(again): encoding what was decoded gives the same bytes. With c = 127 or 7, s = fl(a / c) for
# the largest size a of a block, and its decoded value p = fl(c s): where a is not just above a
# power of two, c s is less than half a step from a, so p = a; where it is, p / c is less than half
# a step from s. Either way fl(p / c) = s. Integers are equal too, since before they are rounded
# they are off by far less than half. The division must be correctly rounded; a product with
# fl(1 / c) would not do.


def encode_blocks(
    values: Tensor, integers: Tensor, scales: Tensor, *, bits: int, block: int
) -> None:
    """Fill `integers` and `scales`, both uint8."""
    numel = values.numel()
    if not numel:
        return
    scale = scales_of(values, limit=2 ** (bits - 1) - 1, block=block)
    scales.view(torch.float32).copy_(scale)
    # The scale of a block that is not finite is nan, and its integers are zeros.
    steps = (_rows(values, block) * scale.reciprocal().unsqueeze(1)).round_().nan_to_num_(nan=0.0)
    if bits == 8:
        integers.view(torch.int8).copy_(steps.view(-1)[:numel])
    else:
        pairs = steps.view(-1)[: numel + numel % 2].to(torch.int8).view(-1, 2)
        integers.view(torch.int8).copy_((pairs[:, 0] & 15) | (pairs[:, 1] << 4))


def decode_blocks(
    integers: Tensor, scales: Tensor, out: Tensor, *, bits: int, block: int, adds: bool
) -> None:
    """Overwrite `out`, or add to it."""
    numel = out.numel()
    if not numel:
        return
    steps = integers.view(torch.int8)
    if bits == 4:
        # The two shifts extend the sign of the low four bits.
        low = steps.bitwise_left_shift(4).bitwise_right_shift_(4)
        steps = torch.stack((low, steps >> 4), dim=1).view(-1)[:numel]
    scale = scales.view(torch.float32)
    whole = numel // block * block
    for start, stop in ((0, whole), (whole, numel)):
        if start < stop:
            shape = (-1, min(block, stop - start))
            factor = scale[start // block : -(-stop // block)].unsqueeze(1)
            rows, target = steps[start:stop].view(shape), out[start:stop].view(shape)
            if adds:
                target += rows * factor
            else:
                torch.mul(rows, factor, out=target)


def scales_of(values: Tensor, *, limit: int, block: int) -> Tensor:
    """Return the scale of each block of float32 values; nan where one is not finite."""
    if not values.numel():
        return values.new_empty(0)
    largest = _rows(values, block).abs().amax(dim=1)
    # Divided by a tensor: on CUDA, torch divides by a number by its inverse, which rounds twice.
    scale = (largest / torch.full_like(largest, limit)).clamp_(LEAST_SCALE, LARGEST / limit)
    return scale.masked_fill_(~largest.isfinite(), torch.nan)


def _rows(values: Tensor, block: int) -> Tensor:
    """Return a row for each block, the last one padded with zeros."""
    missing = -values.numel() % block
    return (pad(values, (0, missing)) if missing else values).view(-1, block)
