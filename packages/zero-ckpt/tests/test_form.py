"""Any tensor becomes a flat run of elements, and a tensor of the same form again."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from zero_ckpt._form import flatten


def _any_tensor(rng: random.Random) -> Tensor:
    """A view of a random tensor: sliced, transposed, expanded, overlapping."""
    shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 4))]
    tensor = torch.randn(shape)
    for _ in range(rng.randint(0, 4)):
        if tensor.dim() == 0:
            tensor = tensor[None].expand(rng.randint(1, 4))
        dim = rng.randrange(tensor.dim())
        match rng.randrange(5):
            case 0:
                tensor = tensor.transpose(dim, rng.randrange(tensor.dim()))
            case 1:
                step, start = rng.randint(1, 3), rng.randrange(tensor.shape[dim])
                size = (tensor.shape[dim] - start + step - 1) // step
                index = [slice(None)] * tensor.dim()
                index[dim] = slice(start, start + size * step, step)
                tensor = tensor[tuple(index)]
            case 2:
                tensor = tensor.unsqueeze(dim).transpose(0, dim)
                tensor = tensor.expand(rng.randint(1, 4), *tensor.shape[1:])
            case 3:
                tensor = tensor.unfold(dim, rng.randint(1, tensor.shape[dim]), 1)
            case 4:
                tensor = tensor.select(dim, rng.randrange(tensor.shape[dim]))
    return tensor


def _pairs(tensor: Tensor) -> list[tuple[int, int]]:
    """Dims of which the first takes larger steps; dims of one element take none."""
    dims = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
    return [(a, b) for a in dims for b in dims if tensor.stride(a) > tensor.stride(b)]


@pytest.mark.parametrize("seed", range(200))
def test_a_tensor_comes_back_with_its_values_shape_and_order_of_strides(seed: int) -> None:
    """Kernels add up in the order of memory: another order is another sum."""
    tensor = _any_tensor(random.Random(seed))
    flat, form = flatten(tensor)

    back = form.over(flat.clone())

    assert torch.equal(back, tensor)
    assert all(back.stride(a) > back.stride(b) for a, b in _pairs(tensor))
    assert flat.is_contiguous()
    assert flat.shape == (form.numel,)


@pytest.mark.parametrize("seed", range(200))
def test_nothing_is_kept_twice(seed: int) -> None:
    """An expanded mask costs what it did, and not a hundred times as much."""
    tensor = _any_tensor(random.Random(seed))
    repeated = [
        0 if step == 0 else size for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    once = tensor[tuple(slice(0, size or 1) for size in repeated)]

    flat, _ = flatten(tensor)

    assert flat.numel() <= tensor.numel()
    assert flat.numel() <= max(once.numel(), tensor.untyped_storage().nbytes() // tensor.itemsize)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6),
        torch.randn(4, 6).t(),
        torch.randn(6).expand(5, 6),
        torch.randn(40).unfold(0, 8, 2),
        torch.randn(40)[8:32].view(4, 6),
    ],
    ids=["dense", "transposed", "expanded", "overlapping", "offset"],
)
def test_what_has_no_gaps_is_not_copied(tensor: Tensor) -> None:
    """A copy of each input would cost a pass over memory."""
    flat, form = flatten(tensor)

    assert flat.data_ptr() == tensor.data_ptr()
    assert form.over(flat).stride() == tensor.stride()


def test_what_is_repeated_and_has_gaps_is_copied_once() -> None:
    """A column of a matrix, expanded to a mask, is a column."""
    column = torch.randn(4, 1000)[:, :1]
    flat, form = flatten(column.expand(4, 10))

    assert torch.equal(flat, column.flatten())
    assert form.strides == (1, 0)
