"""Any input is kept as a flat run of elements, and is a tensor of the same form again."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from zero_ckpt import PackedSaver
from zero_ckpt.testing import late


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


def _kept_bytes(tensor: Tensor) -> tuple[int, Tensor]:
    """What a slot for it takes, and what comes back."""
    saver = PackedSaver(num_slots=1)
    kept = saver.save([tensor], "it")
    (back,) = kept.restore()
    return sum(saver.kept_bytes().values()), back


@pytest.mark.parametrize("seed", range(200))
def test_a_tensor_comes_back_with_its_values_and_its_order_of_strides(seed: int) -> None:
    """Kernels add up in the order of memory: another order is another sum. Nothing is kept twice.

    An expanded mask costs what it did, and not a hundred times as much.
    """
    tensor = _any_tensor(random.Random(seed))
    repeated = [
        0 if step == 0 else size for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    once = tensor[tuple(slice(0, size or 1) for size in repeated)]

    num_bytes, back = _kept_bytes(tensor)

    assert torch.equal(back, tensor)
    assert all(back.stride(a) > back.stride(b) for a, b in _pairs(tensor))
    assert num_bytes <= tensor.nbytes
    assert num_bytes <= max(once.nbytes, tensor.untyped_storage().nbytes())


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
def test_what_has_no_gaps_is_copied_once(tensor: Tensor) -> None:
    """To the host, from where it lies: another copy of each input would be a pass over memory."""
    saver = PackedSaver(on_host=True)
    host = late(saver)

    kept = saver.save([tensor], "it")

    assert host.read_from == [tensor.data_ptr()]
    saver.save([], "the next")  # the first one's copy is over
    assert kept.restore()[0].stride() == tensor.stride()


def test_what_is_repeated_and_has_gaps_is_kept_once() -> None:
    """A column of a matrix, expanded to a mask, is a column."""
    column = torch.randn(4, 1000)[:, :1]
    num_bytes, back = _kept_bytes(column.expand(4, 10))

    assert num_bytes == 4 * 4
    assert torch.equal(back, column.expand(4, 10))
    assert back.stride() == (1, 0)
