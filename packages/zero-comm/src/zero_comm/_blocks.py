"""Blocks of float32 values as integers and scales, in plain torch, on any device.

`_native/codec.cpp` on a CPU and `_triton_codec.py` on CUDA do the same in one pass over memory, to
the same bits.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

LEAST_SCALE: Final = 2.0**-126  # the least normal number: smaller ones have fewer digits, or none
LARGEST: Final = torch.finfo(torch.float32).max * (1 - 2.0**-23)  # divided, rounded and multiplied

# NOTE(again): encoding what was decoded gives the same bytes. With c = 127 or 7, s = fl(a / c) for
# the largest size a of a block, and its decoded value p = fl(c s): where a is not just above a
# power of two, c s is less than half a step from a, so p = a; where it is, p / c is less than half
# a step from s. Either way fl(p / c) = s. Integers come back since they are off by far less than
# half. It takes a correctly rounded division; a product with fl(1 / c) would not do.


def encode_blocks(
    values: Tensor, integers: Tensor, scales: Tensor, *, bits: int, block: int
) -> None:
    """Fill `integers` and `scales`, both uint8."""
    numel = values.numel()
    if not numel:
        return
    scale = scales_of(values, limit=2 ** (bits - 1) - 1, block=block)
    scales.view(torch.float32).copy_(scale)
    # A block that is not finite has no inverse, and nothing but zeros.
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
        low = steps.bitwise_left_shift(4).bitwise_right_shift_(4)  # which carries the sign up
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
    """One for each block of float32 values; nan where one of them is not finite."""
    if not values.numel():
        return values.new_empty(0)
    largest = _rows(values, block).abs().amax(dim=1)
    # By a tensor: torch takes a number's inverse instead on CUDA, which is not the same.
    scale = (largest / torch.full_like(largest, limit)).clamp_(LEAST_SCALE, LARGEST / limit)
    return scale.masked_fill_(~largest.isfinite(), torch.nan)


def _rows(values: Tensor, block: int) -> Tensor:
    """One for each block, the last one filled up with zeros."""
    missing = -values.numel() % block
    return (pad(values, (0, missing)) if missing else values).view(-1, block)
