"""Verified recomputation tells any other bit of what was saved, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from zero_ckpt import Checkpointer, NondeterminismError, Verification

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


class _Saves(torch.autograd.Function):
    """Multiplies by 1, and has autograd save a tensor that backward asks for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors
        return grads[0], None


def _is_told(first: Tensor, second: Tensor) -> bool:
    """Whether it is an error that the second run saves the one where the first saved the other."""
    runs = iter([first, second])
    run = Checkpointer(verifies=Verification()).checkpoint
    output = run(lambda x: _Saves.apply(x, next(runs)), torch.ones(1, requires_grad=True))
    try:
        output.sum().backward()
    except NondeterminismError:
        return True
    return False


@pytest.mark.parametrize("shape", [(), (1,), (3,), (0,), (2, 0, 3), (5, 7), (3, 1, 9)], ids=str)
@pytest.mark.parametrize("dtype", _DTYPES)
def test_one_other_bit_is_told(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The last bit of a float is what a kernel that adds in another order changes."""
    tensor = (torch.rand(shape) * 3).to(dtype)
    other = tensor.clone()
    assert not _is_told(tensor, other)

    if other.numel():
        octets = other.view(-1).view(torch.uint8)
        octets[octets.numel() // 2] ^= 1

        assert _is_told(tensor, other)


def test_what_moves_within_a_tensor_is_seen() -> None:
    """A dropout mask of the same number of ones is another mask."""
    mask = torch.rand(64) < 0.5
    rolled = mask.roll(1)
    assert not torch.equal(rolled, mask)

    assert _is_told(mask, rolled)


def test_signs_of_two_elements_do_not_cancel() -> None:
    """The highest bits of two words are equal to each other's opposite in integers that wrap."""
    tensor = torch.rand(8, dtype=torch.float64)
    other = tensor.clone()
    other[[1, 5]] *= -1

    assert _is_told(tensor, other)


def test_a_tensor_larger_than_a_chunk_is_seen_to_its_end() -> None:
    """Sums of chunks are summed in turn."""
    tensor = torch.zeros((1 << 20) + 3, dtype=torch.int64)
    other = tensor.clone()
    other[-1] = 1
    swapped = tensor.clone()
    swapped[0] = 1

    assert all(_is_told(a, b) for a, b in itertools.combinations((tensor, other, swapped), 2))


def test_how_a_tensor_lies_in_memory_does_not_matter() -> None:
    """A saver gives inputs back contiguous, or an expanded one written out."""
    base = torch.rand(4, 6, 5)
    for tensor in (base.transpose(0, 2), base[1:, ::2], base[:, :1].expand(4, 6, 5), base[0, 0, 1]):
        assert not _is_told(tensor, tensor.clone(memory_format=torch.contiguous_format))


def test_nan_equals_itself_and_no_other_nan() -> None:
    """By value it would differ from itself, and every run that has one would be an alarm."""
    nans = torch.tensor([float("nan")] * 2)
    other = nans.view(torch.int32).add(1).view(torch.float32)

    assert not _is_told(nans, nans.clone())
    assert other.isnan().all() and _is_told(nans, other)


def test_what_has_no_bits_of_its_own_is_not_compared() -> None:
    """Meta tensors hold nothing, and sparse ones several things."""
    for tensor in (torch.empty(3, device="meta"), torch.eye(3).to_sparse()):
        assert not _is_told(tensor, tensor * 2)
