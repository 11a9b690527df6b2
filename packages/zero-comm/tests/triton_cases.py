"""Seeded cases for Triton's kernels, on a GPU or in Triton's interpreter.

    TRITON_INTERPRET=1 python triton_cases.py     # needs no GPU

The interpreter takes tensors of a CPU, and differs from a GPU in one thing: it cuts digits off
where float32 becomes bfloat16, and misreads bfloat16 below 2**-126. Cases for it avoid both.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from zero_comm.codecs import Blockwise, decode_blocks, encode_blocks
from zero_comm.testing import equal, triton_agrees, triton_kernels, using_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS = (2, 6, 8, 128, 256, 1000, 5000, 10000)
KERNELS = triton_kernels()


def check_encode(seed: int, device: str) -> None:
    """Bytes and scales are those of plain torch, wherever tensors begin; beside them is nothing."""
    rng = np.random.default_rng(seed)
    codec, dtype = _codec(rng), DTYPES[seed % 3]
    numel = _numel(rng, codec.block)
    values = _values(rng, numel, dtype, device)
    expected, got = _wire(codec, numel), _wire(codec, numel)
    encode_blocks(values.float(), *expected, bits=codec.bits, block=codec.block)

    integers, scales = _moved(got[0], rng, device), _moved(got[1], rng, device, step=4)
    source = _moved(values, rng, device)
    KERNELS.encode(source, integers, scales, bits=codec.bits, block=codec.block)

    assert torch.equal(integers.cpu(), expected[0]), (seed, codec, numel, dtype)
    assert torch.equal(scales.cpu(), expected[1]), (seed, codec, numel, dtype)
    assert all(_is_alone(tensor) for tensor in (integers, scales)), (seed, codec, numel, dtype)


def check_decode(seed: int, device: str) -> None:
    """So are values, of any bytes and scales there can be; overwritten, and added to."""
    rng = np.random.default_rng(seed)
    codec, dtype, adds = _codec(rng), DTYPES[seed % 3], seed % 2 == 1
    numel = _numel(rng, codec.block)
    integers, scales = _wire(codec, numel)
    integers.copy_(torch.from_numpy(rng.integers(256, size=len(integers), dtype=np.uint8)))
    steps = rng.integers(-140, 120, size=len(scales) // 4)
    factors = torch.ldexp(torch.ones(len(steps)), torch.from_numpy(steps))
    total = torch.from_numpy(rng.standard_normal(numel)).to(dtype)
    if device == "cpu" and dtype == torch.bfloat16:  # whatever is decoded, it has few digits
        factors, total = factors.clamp(2.0**-110), torch.zeros_like(total)
    else:
        factors *= torch.from_numpy(rng.uniform(1, 2, size=len(steps))).float()
    factors[rng.random(len(steps)) < 0.1] = torch.nan
    scales.view(torch.float32).copy_(factors)
    expected = total.to(torch.float32, copy=True)
    decode_blocks(integers, scales, expected, bits=codec.bits, block=codec.block, adds=adds)

    out = _moved(total, rng, device)
    sent = _moved(integers, rng, device), _moved(scales, rng, device, step=4)
    KERNELS.decode(*sent, out, bits=codec.bits, block=codec.block, adds=adds)

    assert _same(out.cpu(), expected.to(dtype)), (seed, codec, numel, dtype, adds)
    assert _is_alone(out), (seed, codec, numel, dtype, adds)


def check_codec(device: str) -> None:
    """A codec hands them whole tensors of each dtype, and empty ones."""
    for codec in (Blockwise(8), Blockwise(4), Blockwise(8, block=100)):
        for dtype in DTYPES:
            for numel in (0, 1, 9_001):
                values = torch.linspace(-8, 8, numel).to(dtype)
                results = []
                for found, where in ((None, "cpu"), (KERNELS, device)):
                    with using_kernels(found):
                        wire = codec.encode(values.to(where))
                        decoded = codec.decode(wire, torch.empty(numel, device=where))
                        added = codec.decode_add(wire, torch.ones(numel, device=where))
                        results.append((wire.cpu(), decoded.cpu(), added.cpu()))
                assert all(map(equal, *results)), (codec, dtype, numel)


def _codec(rng: np.random.Generator) -> Blockwise:
    return Blockwise(int(rng.choice([8, 4])), int(rng.choice(BLOCKS)))


def _numel(rng: np.random.Generator, block: int) -> int:
    """Around the block, around what a program has, and anywhere."""
    edge = int(rng.choice([0, block, 2 * block, 4096, 8192]))
    return (
        max(1, edge + int(rng.integers(-1, 2)))
        if rng.random() < 0.6
        else int(rng.integers(1, 20000))
    )


def _values(rng: np.random.Generator, numel: int, dtype: torch.dtype, device: str) -> Tensor:
    values = torch.from_numpy(rng.standard_normal(numel)).float()
    kinds = ["usual", "wide", "ties", "spoiled", "zeros", "largest", "smallest"]
    match kinds[rng.integers(len(kinds) - (device == "cpu" and dtype == torch.bfloat16))]:
        case "wide":
            values *= torch.from_numpy(10.0 ** rng.uniform(-8, 4, size=numel)).float()
        case "ties":
            values = torch.from_numpy(rng.integers(-254, 255, size=numel)) / 2
        case "spoiled":
            values[rng.random(numel) < 0.001] = torch.nan
            values[rng.random(numel) < 0.001] = -torch.inf
        case "zeros":
            values = torch.where(torch.from_numpy(rng.random(numel) < 0.5), 0.0, -0.0)
        case "largest":
            values = values.clamp(-1, 1) * torch.finfo(dtype).max
        case "smallest":
            values *= float(rng.choice([1e-45, 1e-42, 1e-40, 2.0**-126, 2.0**-119]))
    return values.to(dtype)


def _wire(codec: Blockwise, numel: int) -> tuple[Tensor, Tensor]:
    numel_bytes, scale_bytes = codec.value_bytes(numel), codec.scale_bytes(numel)
    return torch.zeros(numel_bytes, dtype=torch.uint8), torch.zeros(scale_bytes, dtype=torch.uint8)


def _moved(tensor: Tensor, rng: np.random.Generator, device: str, step: int = 1) -> Tensor:
    """The same on a device, from any multiple of `step` on, with guards about it."""
    start = 16 + step * int(rng.choice([0, 0, 1, 2, 3]))
    around = torch.full((start + tensor.numel() + 16,), 77, dtype=tensor.dtype, device=device)
    return around[start : start + tensor.numel()].copy_(tensor)


def _is_alone(tensor: Tensor) -> bool:
    around, start = tensor._base, tensor.storage_offset()
    assert around is not None
    return bool((around[:start] == 77).all() and (around[start + tensor.numel() :] == 77).all())


def _same(got: Tensor, expected: Tensor) -> bool:
    """To the bit; the bits of a nan are each device's own."""
    as_bits = {4: torch.int32, 2: torch.int16}[got.itemsize]
    both = [torch.where(t.isnan(), 0, t).view(as_bits) for t in (got, expected)]
    return torch.equal(got.isnan(), expected.isnan()) and torch.equal(*both)


if __name__ == "__main__":
    for each in range(90):
        check_encode(each, "cpu")
        check_decode(each, "cpu")
    check_codec("cpu")
    assert triton_agrees(KERNELS, torch.device("cpu"))
    print("all agree")
