"""Equal bits give equal sums, and one other bit another one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from zero_ckpt._checksums import Checksums, order_of

_DTYPES = [
    torch.bool,
    torch.int8,
    torch.uint16,
    torch.int64,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def _sum(tensor: Tensor, like: Tensor | None = None) -> int:
    total = Checksums().of(tensor, order_of(tensor if like is None else like))
    assert total is not None
    return int(total)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (0,), (2, 0, 3), (5, 7), (3, 1, 9)], ids=str)
@pytest.mark.parametrize("dtype", _DTYPES)
def test_one_bit_makes_another_sum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The last bit of a float is what a kernel that adds in another order changes."""
    tensor = (torch.rand(shape) * 3).to(dtype)
    other = tensor.clone()
    assert _sum(other) == _sum(tensor)

    if other.numel():
        octets = other.view(-1).view(torch.uint8)
        octets[octets.numel() // 2] ^= 1

        assert _sum(other) != _sum(tensor)


def test_what_moves_within_a_tensor_is_seen() -> None:
    """A dropout mask of the same number of ones is another mask."""
    mask = torch.rand(64) < 0.5
    rolled = mask.roll(1)
    assert not torch.equal(rolled, mask)

    assert _sum(rolled) != _sum(mask)


def test_signs_of_two_elements_do_not_cancel() -> None:
    """The highest bits of two words are equal to each other's opposite in integers that wrap."""
    tensor = torch.rand(8, dtype=torch.float64)
    other = tensor.clone()
    other[[1, 5]] *= -1

    assert _sum(other) != _sum(tensor)


def test_a_tensor_larger_than_a_chunk_is_seen_to_its_end() -> None:
    """Sums of chunks are summed in turn."""
    tensor = torch.zeros((1 << 20) + 3, dtype=torch.int64)
    other = tensor.clone()
    other[-1] = 1
    swapped = tensor.clone()
    swapped[0] = 1

    assert len({_sum(tensor), _sum(other), _sum(swapped)}) == 3


def test_a_sum_does_not_depend_on_how_the_tensor_lies_in_memory() -> None:
    """A saver gives inputs back contiguous, or an expanded one written out."""
    base = torch.rand(4, 6, 5)
    for tensor in (base.transpose(0, 2), base[1:, ::2], base[:, :1].expand(4, 6, 5), base[0, 0, 1]):
        assert _sum(tensor.clone(memory_format=torch.contiguous_format), tensor) == _sum(tensor)


def test_nan_equals_itself_and_no_other_nan() -> None:
    """By value it would differ from itself, and every run that has one would be an alarm."""
    nans = torch.tensor([float("nan")] * 2)
    other = nans.view(torch.int32).add(1).view(torch.float32)

    assert _sum(nans.clone()) == _sum(nans)
    assert other.isnan().all() and _sum(other) != _sum(nans)


def test_what_has_no_bits_of_its_own_has_no_sum() -> None:
    """Meta tensors hold nothing, and sparse ones several things."""
    for tensor in (torch.empty(3, device="meta"), torch.eye(3).to_sparse()):
        assert Checksums().of(tensor, order_of(tensor)) is None
