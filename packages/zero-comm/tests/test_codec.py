"""Codecs: what is written, what comes back, and how far from where it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from zero_comm import AbstractCodec, Blockwise, Cast, CodecError, parse_codec
from zero_comm.testing import equal

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUMELS = [0, 1, 2, 7, 8, 9, 255, 256, 257, 511, 512, 1000, 33000]
BLOCKWISE = [Blockwise(8), Blockwise(4), Blockwise(8, block=8), Blockwise(4, block=128)]
CASTS = [Cast(torch.bfloat16), Cast(torch.float16), Cast(torch.float32)]
CODECS = [*BLOCKWISE, *CASTS]
HALF_STEP = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

each_codec = pytest.mark.parametrize("codec", CODECS, ids=str)
each_blockwise = pytest.mark.parametrize("codec", BLOCKWISE, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def _values(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Of all sizes: each run of 40 has another order of magnitude."""
    generator = torch.Generator().manual_seed(1000 * numel + seed)
    sizes = torch.logspace(-4, 4, numel // 40 + 1).repeat_interleave(40)[:numel]
    return (torch.randn(numel, generator=generator) * sizes).to(dtype)


def _back(codec: AbstractCodec, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    out = torch.full(values.shape, 77, dtype=dtype or values.dtype)
    assert codec.decode(codec.encode(values), out) is out
    return out


# ---- What is written ----


@pytest.mark.parametrize("numel", NUMELS)
@each_blockwise
@each_dtype
def test_integers_and_scales_are_those_of_the_definition(
    codec: Blockwise, numel: int, dtype: torch.dtype
) -> None:
    """Ranks with and without kernels, on CPU and GPU, must write the same; here it is in numpy."""
    values = _values(numel, dtype)

    wire = codec.encode(values)

    assert wire.dtype == torch.uint8
    assert wire.numpy().tobytes() == _written(values.float().numpy(), codec.bits, codec.block)
    assert wire.numel() == codec.wire_bytes(numel)


def _written(values: np.ndarray, bits: int, block: int) -> bytes:
    limit = np.float32(127 if bits == 8 else 7)
    integers, scales = [], []
    for start in range(0, len(values), block):
        chunk = values[start : start + block]
        scale = max(np.abs(chunk).max() / limit, np.float32(2.0**-126))
        scales.append(scale)
        integers += np.rint(chunk * (np.float32(1) / scale)).astype(int).tolist()
    if bits == 4:
        integers += [0] * (len(integers) % 2)
        pairs = zip(integers[::2], integers[1::2], strict=True)
        integers = [(low & 15) | (high & 15) << 4 for low, high in pairs]
    packed = bytes(i & 255 for i in integers)
    return packed + bytes(-len(packed) % 4) + np.array(scales, dtype=np.float32).tobytes()


@pytest.mark.parametrize("numel", NUMELS)
def test_wire_bytes_are_those_of_the_formula(numel: int) -> None:
    """Plans and peers count on them before anything is encoded."""
    blocks = -(-numel // 256)
    for codec, value_bytes, scale_bytes in [
        (Blockwise(8), numel, 4 * blocks),
        (Blockwise(4), -(-numel // 2), 4 * blocks),
        (Cast(torch.bfloat16), 2 * numel, 0),
        (Cast(torch.float16), 2 * numel, 0),
        (Cast(torch.float32), 4 * numel, 0),
    ]:
        assert codec.value_bytes(numel) == value_bytes
        assert codec.scale_bytes(numel) == scale_bytes
        assert codec.wire_bytes(numel) == value_bytes + -value_bytes % 4 + scale_bytes
        assert codec.encode(torch.ones(numel)).shape == (codec.wire_bytes(numel),)


@each_codec
@each_dtype
def test_every_byte_is_written(codec: AbstractCodec, dtype: torch.dtype) -> None:
    """What was in memory before must neither travel nor make equal values differ."""
    for numel in NUMELS:
        values, before = _values(numel, dtype), _values(numel, dtype)
        wires = [torch.full((codec.wire_bytes(numel),), fill, dtype=torch.uint8) for fill in (0, 9)]
        for wire in wires:
            assert codec.encode(values, wire) is wire
        assert equal(*wires)
        assert equal(values, before)


# ---- What comes back ----


@pytest.mark.parametrize("numel", NUMELS)
@each_codec
@each_dtype
def test_values_come_back_within_the_bound(
    codec: AbstractCodec, numel: int, dtype: torch.dtype
) -> None:
    """The bound is what users are told; a tenth more and it is not one."""
    values = _values(numel, dtype)
    bound = codec.error_bound(values)

    for out_dtype in DTYPES:
        back = _back(codec, values, out_dtype).float()
        rounding = (values.float().abs() + bound) * HALF_STEP[out_dtype] + 2.0**-25
        exceeds = (back - values.float()).abs() > bound + rounding * (HALF_STEP[out_dtype] > 0)
        assert not exceeds[back.isfinite()].any()
        assert back.isfinite().all() or torch.float16 in (out_dtype, getattr(codec, "dtype", None))


@each_blockwise
def test_the_bound_is_half_a_scale(codec: Blockwise) -> None:
    """Stated as such in the documentation; and as near as makes no difference it is reached."""
    values = _values(33000)
    error = (_back(codec, values) - values).abs()
    for start in range(0, 33000, codec.block):
        block = slice(start, start + codec.block)
        half = values[block].abs().max() / codec.limit / 2
        assert torch.allclose(codec.error_bound(values[block]), half, rtol=1e-4)
        assert error[block].max() <= half * (1 + 1e-4)
    assert (error / codec.error_bound(values)).max() > 0.99


@pytest.mark.parametrize("numel", NUMELS)
@each_codec
@each_dtype
def test_encoding_again_changes_nothing(
    codec: AbstractCodec, numel: int, dtype: torch.dtype
) -> None:
    """Parameters kept encoded are gathered every step, and must not drift."""
    for seed in range(20):
        wire = codec.encode(_values(numel, dtype, seed))
        decoded = codec.decode(wire, torch.empty(numel, dtype=dtype))
        assert equal(codec.encode(decoded), wire)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_of_a_block_never_wanders(bits: int) -> None:
    """Just above a power of two a scale comes back only because its division rounds correctly."""
    codec, limit = Blockwise(bits, block=2), 2 ** (bits - 1) - 1
    sizes = torch.cat([torch.rand(100_000) + 1, 1 + torch.arange(50_000) * 2.0**-23])
    for size in (sizes, sizes * limit, sizes * 2.0**-120, sizes * 2.0**126):
        values = torch.stack((size, -size / 3), dim=1).view(-1)
        wire = codec.encode(values)
        assert equal(codec.encode(_back(codec, values)), wire)


@each_codec
def test_adding_is_decoding_and_adding(codec: AbstractCodec) -> None:
    """Sums over ranks are taken so, and one process must be able to repeat them."""
    for numel in NUMELS:
        values, total = _values(numel), _values(numel, seed=1)
        expected = total + _back(codec, values)
        assert equal(codec.decode_add(codec.encode(values), total), expected)


@each_codec
@each_dtype
def test_the_relative_error_is_that_of_what_comes_back(
    codec: AbstractCodec, dtype: torch.dtype
) -> None:
    """Reports show it for each unit."""
    values = _values(1000, dtype)
    exact = values.double()
    share = (_back(codec, values, torch.float32).double() - exact).norm() / exact.norm()

    assert codec.relative_error(values) == pytest.approx(share.item(), rel=1e-4)
    assert codec.relative_error(torch.zeros(9, dtype=dtype)) == 0
    assert codec.relative_error(torch.empty(0, dtype=dtype)) == 0
    assert codec.relative_error(torch.tensor([1, torch.nan], dtype=dtype)).isnan()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_codec
@each_dtype
def test_a_gpu_writes_and_reads_the_same_bits(codec: AbstractCodec, dtype: torch.dtype) -> None:
    """Checkpoints of encoded values move between devices, and ranks of both kinds may meet."""
    for numel in NUMELS:
        values = _values(numel, dtype)
        values[::700] = torch.nan
        wire, on_gpu = codec.encode(values), codec.encode(values.cuda())
        assert equal(on_gpu.cpu(), wire)

        back = codec.decode(on_gpu, torch.empty_like(values, device="cuda")).cpu()
        assert equal(back.nan_to_num(), _back(codec, values).nan_to_num())
        total = codec.decode_add(on_gpu, torch.ones(numel, device="cuda")).cpu()
        expected = codec.decode_add(wire, torch.ones(numel))
        assert equal(total.nan_to_num(), expected.nan_to_num())


# ---- Values that are special ----


@each_codec
@each_dtype
def test_zeros_are_exact(codec: AbstractCodec, dtype: torch.dtype) -> None:
    """Padding stays zero, and a gradient that is zero moves nothing."""
    values = torch.zeros(600, dtype=dtype)
    assert equal(_back(codec, values), values)

    among = _values(600, dtype)
    among[::3] = 0
    assert (_back(codec, among)[::3] == 0).all()


@each_blockwise
@pytest.mark.parametrize("size", [2.0**-149, 3 * 2.0**-149, 1e-42, 1e-39, 2.0**-126, 1e-37, 1e-36])
def test_the_smallest_values_neither_divide_by_zero_nor_exceed_the_bound(
    codec: Blockwise, size: float
) -> None:
    """A scale that underflows is a division by zero, and nan out of numbers that were fine."""
    values = torch.linspace(-size, size, 300)
    back = _back(codec, values)

    assert back.isfinite().all()
    assert ((back.double() - values.double()).abs() <= codec.error_bound(values)).all()
    assert codec.error_bound(values).max() <= max(size / codec.limit, 2.0**-126)
    assert equal(codec.encode(back), codec.encode(values))


@each_blockwise
def test_the_largest_values_stay_finite(codec: Blockwise) -> None:
    """A product of scale and integer must not overflow where the value had room."""
    values = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, 1.0])
    back = _back(codec, values)

    assert back.isfinite().all()
    assert ((back.double() - values.double()).abs() <= codec.error_bound(values).double()).all()
    assert equal(codec.encode(back), codec.encode(values))


@each_blockwise
@each_dtype
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_block_and_no_other(
    codec: Blockwise, dtype: torch.dtype, bad: float
) -> None:
    """An overflow must be seen by whoever skips the step, wherever it happened."""
    clean = _values(3 * codec.block + 5, dtype).clamp(-100, 100)
    for position in (0, codec.block - 1, codec.block, 3 * codec.block + 4):
        values = clean.clone()
        values[position] = bad
        back = _back(codec, values)
        spoilt = torch.arange(len(values)) // codec.block == position // codec.block

        assert back[spoilt].isnan().all()
        assert equal(back[~spoilt], _back(codec, clean)[~spoilt])
        assert codec.error_bound(values)[spoilt].isnan().all()
        assert equal(codec.encode(back), codec.encode(values))


@pytest.mark.parametrize("codec", CASTS, ids=str)
def test_a_cast_keeps_what_is_not_finite(codec: Cast) -> None:
    """As for blocks; and what has no room becomes inf, not the largest number."""
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, 1.0])
    back, expected = _back(codec, values), values.to(codec.dtype).float()

    assert equal(back.isnan(), expected.isnan())
    assert equal(back[1:], expected[1:])
    assert codec.error_bound(values)[3].isinf() == (codec.dtype == torch.float16)


@each_blockwise
def test_one_outlier_costs_its_block_only(codec: Blockwise) -> None:
    """That is what blocks are for; and the outlier itself comes back, where it matters most."""
    values = _values(4 * codec.block).clamp(-1, 1)
    values[codec.block + 1] = 1e6
    back = _back(codec, values)
    others = torch.arange(len(values)) // codec.block != 1

    assert back[codec.block + 1] == pytest.approx(1e6, rel=1e-6)
    assert ((back - values).abs()[others] <= 1 / codec.limit / 2 * 1.0001).all()


# ---- Names, and what is refused ----


def test_names_are_read_and_given() -> None:
    """They stand in configurations and reports."""
    assert parse_codec("none") is None
    assert parse_codec("int8") == Blockwise(bits=8, block=256)
    assert parse_codec("int4:128") == Blockwise(bits=4, block=128)
    assert parse_codec("bf16") == Cast(torch.bfloat16)
    for codec in CODECS:
        assert parse_codec(str(codec)) == codec


@pytest.mark.parametrize("name", ["", "int2", "int8:", "int8:x", "int8:-2", "fp16:8", "none:8"])
def test_other_names_are_refused(name: str) -> None:
    """A misspelt codec must not mean none."""
    with pytest.raises(CodecError, match=r"none, bf16, fp16, fp32, int8, int4"):
        parse_codec(name)


def test_what_does_not_fit_is_refused() -> None:
    """Before anything is written, and saying what was expected."""
    codec = Blockwise(8)
    wire = codec.encode(torch.ones(9))
    with pytest.raises(CodecError, match=r"float32, bfloat16 and float16, got torch\.int64"):
        codec.encode(torch.ones(9).long())
    with pytest.raises(CodecError, match="1-D and contiguous"):
        codec.encode(torch.ones(3, 3))
    with pytest.raises(CodecError, match=r"int8 writes 9 elements as 16 bytes: .* \(15,\)"):
        codec.encode(torch.ones(9), wire[:-1])
    with pytest.raises(CodecError, match=r"int8 writes 13 elements as 20 bytes"):
        codec.decode(wire, torch.empty(13))
    with pytest.raises(CodecError, match="at byte 1"):
        codec.encode(torch.ones(9), torch.empty(17, dtype=torch.uint8)[1:])
    with pytest.raises(CodecError, match=r"expected float32 to add .* got torch.bfloat16"):
        codec.decode_add(wire, torch.empty(9, dtype=torch.bfloat16))
    with pytest.raises(CodecError, match="8 or 4 bits, got 2"):
        Blockwise(2)
    with pytest.raises(CodecError, match="even number of elements, got 7"):
        Blockwise(8, block=7)
    with pytest.raises(CodecError, match=r"got torch\.int8"):
        Cast(torch.int8)


def test_parameters_are_encoded_without_a_graph() -> None:
    """What travels is a value."""
    values = torch.ones(9, requires_grad=True)
    codec = Blockwise(8)
    assert not codec.decode(codec.encode(values), torch.empty(9)).requires_grad
